"""Which body serves a call of attention on JAX, and why a better one does not: facts in, name out.

Nothing here asks a device, so that tests and `kmodels doctor` can ask for platforms that are not
there. No choice was measured on a GPU or TPU yet: cuDNN's and splash attention's kernels are
preferred because they hold nothing of the size of query times key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Body = Literal["cudnn", "splash", "ring", "loops", "products", "generic"]

# Tokens up to which a CPU keeps the weights for the way back: loops were measured not to be slower.
LONG = 512
# Pairs of query and key from which loops serve on an accelerator; shorter texts keep the op's body.
PAIRS = 2**19
# Widths of heads that cuDNN serves: on Hopper, and on older GPUs.
WIDEST_ON_HOPPER, WIDEST = 256, 128
# Lanes of a TPU's vectors: splash attention's blocks are multiples of them.
LANES = 128


@dataclass(frozen=True)
class Device:
    """What runs the program.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu", or another name of JAX's.
        capability: CUDA's compute capability, as (9, 0).
        cudnn: whether JAX found cuDNN.
        deterministic: whether XLA was told to use deterministic kernels alone.
    """

    platform: str
    capability: tuple[int, int] = (0, 0)
    cudnn: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Facts:
    """What is known of a call before it runs.

    Attributes:
        device: what runs the program.
        query: (B, T, N, H); a size that is not known is None.
        key: (B, S, K, H).
        value_width: width of a value's heads.
        dtype: of query, key and value.
        causal: as in `ops.attention`.
        window: as in `ops.attention`.
        hidden: which of "mask", "segments" and "blocks" are given.
        soft_cap: whether there is one.
        drops: whether weights are dropped.
        generator: whether the seed is a `SeedGenerator`.
        rows: number of parts in which a mesh cuts the batch; 0 where it may be cut in another way.
        parts: number of parts in which a mesh may cut heads; 0 where nobody knows.
        tokens: number of parts in which a mesh cuts tokens.
    """

    device: Device
    query: tuple[int | None, ...]
    key: tuple[int | None, ...]
    value_width: int | None
    dtype: str
    causal: bool = False
    window: int | None = None
    hidden: frozenset[str] = frozenset()
    soft_cap: bool = False
    drops: bool = False
    generator: bool = True
    rows: int = 1
    parts: int = 1
    tokens: int = 1


class Choice(NamedTuple):
    """A body, and one clause that says why a better one does not serve; None where none would."""

    body: Body
    reason: str | None = None


def choose(facts: Facts) -> Choice:
    """Returns the body that serves a call; "generic" is the op's own."""
    if len(facts.query) != 4 or len(facts.key) != 4:
        return Choice("generic", "query and key have no four axes")  # which the op says itself
    if not all(isinstance(size, int) for size in (*facts.query[1:], *facts.key[1:])):
        return Choice("generic", "lengths are not known")  # None, or what jax.export has for them
    if facts.drops and not facts.generator:
        return Choice("generic", "the seed is no SeedGenerator")
    reason = None
    if facts.tokens > 1:
        reason = ring_declines(facts)
        return Choice("ring") if reason is None else without_kernel(facts, reason)
    for body, declines in KERNELS.get(facts.device.platform, ()):
        reason = declines(facts)
        if reason is None:
            return Choice(body)
    return without_kernel(facts, reason)


def without_kernel(facts: Facts, reason: str | None) -> Choice:
    """Returns the body that serves where no kernel does, for this reason."""
    pairs = _length(facts) * _keys(facts)
    if facts.parts != 1 and (why := heads_decline(facts)):
        return Choice("generic", reason or why)
    if facts.device.platform == "cpu":
        short = not facts.soft_cap and "blocks" not in facts.hidden and pairs <= LONG**2
        return Choice("products" if short else "loops", reason)
    if pairs > PAIRS:
        return Choice("loops", reason)
    return Choice("generic", reason or "the op's own body serves short texts")


def cudnn_declines(facts: Facts) -> str | None:
    """Returns why cuDNN's kernel does not serve a call (a clause), or None."""
    device, width = facts.device, facts.query[3]
    widest = WIDEST_ON_HOPPER if device.capability[0] == 9 else WIDEST
    if not device.cudnn:
        return "JAX finds no cuDNN"
    if device.capability < (8, 0):
        return "cuDNN's kernel needs compute capability 8.0"
    if device.deterministic:
        return "the gradients of cuDNN's kernel are not deterministic"
    if facts.dtype not in ("float16", "bfloat16"):
        return f"cuDNN's kernel takes float16 and bfloat16, not {facts.dtype}"
    if width is None or width % 8 or width > widest:
        return f"cuDNN's kernel takes heads up to {widest} wide in steps of 8, not {width}"
    if reason := _kernel_declines(facts, "cuDNN's kernel"):
        return reason
    if "segments" in facts.hidden:
        return "cuDNN's kernel takes no segments"
    if facts.soft_cap:
        return "cuDNN's kernel takes no soft cap"
    if facts.causal and facts.query[1] != facts.key[1]:
        return "cuDNN's causal mask begins at the first key"
    if facts.window is not None and not facts.causal:
        return "cuDNN's kernel takes windows in causal attention alone"
    return heads_decline(facts)


def splash_declines(facts: Facts) -> str | None:
    """Returns why splash attention does not serve a call (a clause), or None."""
    width = facts.query[3]
    if facts.dtype not in ("float32", "bfloat16"):
        return f"splash attention takes float32 and bfloat16, not {facts.dtype}"
    if width is None or width % (LANES // 2):
        return f"splash attention takes heads whose width is a multiple of 64, not {width}"
    if _length(facts) < LANES:
        return f"splash attention pays from {LANES} queries on"
    if facts.window is not None and _length(facts) > _keys(facts):
        return "a query before the first key may see nothing"
    return _kernel_declines(facts, "splash attention") or heads_decline(facts)


# By platform, the kernels in the order in which they are tried.
KERNELS: dict[str, tuple[tuple[Body, Callable[[Facts], str | None]], ...]] = {
    "cuda": (("cudnn", cudnn_declines),),
    "tpu": (("splash", splash_declines),),
}


def _kernel_declines(facts: Facts, name: str) -> str | None:
    """Returns what no kernel serves."""
    if not facts.query[0]:
        return "the batch is empty, or its size is not known"
    for what, word in (("mask", "dense mask"), ("blocks", "image blocks")):
        if what in facts.hidden:
            return f"{name} takes no {word}"
    if facts.drops:
        return f"{name} takes no dropout"
    if facts.value_width != facts.query[3]:
        return f"{name} takes values as wide as keys"
    return None


def heads_decline(facts: Facts) -> str | None:
    """Returns why a mesh cannot have each device compute its own rows and heads, or None."""
    batch, heads, groups = facts.query[0], facts.query[2], facts.key[2]
    if not facts.rows or not facts.parts:
        return "under ModelParallel heads may lie on several devices"
    if facts.rows * facts.parts == 1:
        return None
    if not isinstance(batch, int) or batch % facts.rows or not batch:
        return f"a batch of {batch} does not divide by the {facts.rows} parts of the mesh"
    if facts.drops and facts.parts > 1:
        return "where heads are cut the op's own body draws what is dropped"
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % facts.parts:
        return None  # they stay whole on each device
    if groups % facts.parts and (heads // groups) % (heads // facts.parts):
        return f"{groups} key heads do not divide by the {facts.parts} parts of the mesh"
    return None


def ring_declines(facts: Facts) -> str | None:
    """Returns why the parts of rows on several devices do not serve a call (a clause), or None."""
    length = _length(facts)
    if length != _keys(facts):
        return f"{length} queries and {_keys(facts)} keys do not lie on the same devices"
    if length % facts.tokens:
        return f"{length} tokens do not divide by the {facts.tokens} parts of the mesh"
    return heads_decline(facts)


def _length(facts: Facts) -> int:
    return facts.query[1] or 0


def _keys(facts: Facts) -> int:
    return facts.key[1] or 0
