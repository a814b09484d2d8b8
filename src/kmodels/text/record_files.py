"""Records to train on out of JSON lines or a folder, with errors that name the file and line."""

from pathlib import Path

from kmodels.core.errors import InputError
from kmodels.core.files import is_remote
from kmodels.core.remote import local_copy
from kmodels.text.image_files import folder_entries, with_paths
from kmodels.text.json_lines import MAX_LINE_BYTES, json_records
from kmodels.text.records import FORMS, Records, check_record


def read_records(
    path: str | Path, *, skip_bad: bool = False, max_line_bytes: int = MAX_LINE_BYTES
) -> Records:
    """Reads a file of one JSON object a line or one JSON array, or a folder of images with texts.

    Args:
        path: local, or an address such as "gs://bucket/file.jsonl"; UTF-8. The fields of a line are
            instruction, context and response (as in Dolly; input and output as in Alpaca), prompts
            and responses, messages with role and content (and tools, JSON schemas of functions that
            the model may call), conversations with from and value (as in ShareGPT and LLaVA, whose
            "<image>" marks the place of an image), or text. "images" has the paths of a record's
            images, one or a list, and parts of a message may have them; relative ones begin at the
            file's folder. More fields are ignored, blank lines too. A folder has metadata.jsonl or
            metadata.csv, whose lines name an image by "file_name" (or several by "file_names")
            beside the other fields, as Hugging Face's imagefolder; or a text beside each image,
            a.txt beside a.png.
        skip_bad: leave out bad lines and list them, where they would raise; images are decoded to
            find out.
        max_line_bytes: a longer line is bad.

    Returns:
        The records in the order of the lines, or of the names of images.

    Raises:
        InputError: for the first bad line, an image that is not there or is an address of the web,
            or if there is no good record.
    """
    records = Records()
    file = local_copy(path)
    if file.is_dir():
        entries, folder = folder_entries(file, max_line_bytes), str(file)
    else:
        entries = json_records(file, path, max_line_bytes)
        # Of an address the images are beside it, not beside its copy.
        folder = str(path).rpartition("/")[0] if is_remote(path) else str(file.parent)
    try:
        for where, read in entries:
            try:
                records.rows.append(with_paths(check_record(read()), folder, skip_bad))
            except InputError as error:
                problem = f"{where}: {error}"
                if not skip_bad:
                    raise InputError(problem) from error.__cause__
                records.skipped.append(problem)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not records.rows:
        bad = f"; all {len(records.skipped)} lines are bad" if records.skipped else ""
        raise InputError(f"{path} holds no records{bad}; give one JSON object a line with {FORMS}")
    return records
