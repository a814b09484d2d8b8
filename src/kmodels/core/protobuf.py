"""Messages of Protocol Buffers by a table of their fields, without generated code."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kmodels.core.errors import one_line

_SCALARS = ("bool", "bytes", "float", "int32", "int64", "string")


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        name: attribute of a message that holds the value.
        number: on the wire.
        kind: "bool", "bytes", "float", "int32", "int64", "string", or a message of the table.
        repeated: whether there may be several values.
        oneof: name of the group of which a message has one.
        default: value of a field that is not there, as the descriptor writes it; proto2 alone.
    """

    name: str
    number: int
    kind: str
    repeated: bool = False
    oneof: str = ""
    default: str = ""


def message_classes(
    name: str, table: Mapping[str, Sequence[Field]], syntax: str = "proto3"
) -> dict[str, Any]:
    """Returns classes of messages, in a pool of their own, by the names of the table.

    Fields that the table lacks are kept aside by the classes, as Protocol Buffers do. The syntax
    "proto2" writes what was set though it is the default, and "proto3" does not.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name, syntax=syntax)
    for message, fields in table.items():
        made = file.message_type.add(name=message)
        groups = list(dict.fromkeys(field.oneof for field in fields if field.oneof))
        for group in groups:
            made.oneof_decl.add(name=group)
        for field in fields:
            label = kinds.LABEL_REPEATED if field.repeated else kinds.LABEL_OPTIONAL
            added = made.field.add(name=field.name, number=field.number, label=label)
            if field.kind in _SCALARS:
                added.type = getattr(kinds, f"TYPE_{field.kind.upper()}")
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{name}.{field.kind}"
            if field.oneof:
                added.oneof_index = groups.index(field.oneof)
            if field.default:
                added.default_value = field.default
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{name}.{message}"))
        for message in table
    }


def parse(message: Any, content: bytes) -> Any:
    """Returns the message that bytes hold.

    Raises:
        ValueError: where they hold no such message, with a reason in one line.
    """
    from google.protobuf.message import DecodeError

    try:
        return message.FromString(content)
    except DecodeError as error:
        raise ValueError(one_line(error)) from error
