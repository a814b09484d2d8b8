"""The model "kmodels" of lm-evaluation-harness.

`python -m kmodels.interop.lm_eval` is the `lm_eval` command with this model; in Python, importing
this module registers it for `lm_eval.simple_evaluate(model="kmodels", ...)`.
"""

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kmodels import presets
from kmodels.core import runtime
from kmodels.core.errors import InputError, check_names
from kmodels.generation.sampler import FILTERS
from kmodels.interop.packages import need
from kmodels.text.chat_template import choose_template
from kmodels.tools.likelihood import LanguageScorer

try:
    need("lm_eval", "lm-eval", "eval")
except InputError as error:
    if __name__ != "__main__":
        raise
    print(f"kmodels: {error}", file=sys.stderr)
    raise SystemExit(2) from None
# lm_eval registers its own models only if there are none yet.
import lm_eval.models  # type: ignore[import-not-found] # noqa: F401
from lm_eval.api.model import LM  # type: ignore[import-not-found]
from lm_eval.api.registry import register_model  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]

log = logging.getLogger("kmodels")
# Names of the largest number of new tokens, the first of a request counts.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("kmodels")
class KModelsLM(LM):
    """A language model of kmodels, with the results that lm-evaluation-harness's "hf" has.

    Args:
        pretrained: directory, file or address of a model.
        adapter: directory with a LoRA adapter of kmodels or PEFT.
        dtype: dtype policy of the model.
        batch_size: rows of a forward pass.
        max_length: see `LanguageScorer`.
        max_gen_toks: new tokens of a reply, if a task does not say.
        add_bos_token: False for texts without the start token.
        max_batch_size: only None.
        device: has no effect: Keras chooses the device.

    Raises:
        InputError: for wrong values, or a path without a language model and its tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        adapter: str | None = None,
        dtype: str = "float32",
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        if max_batch_size is not None or not str(batch_size).isdecimal():
            raise InputError(f"batch_size is {batch_size}; give a number, and no max_batch_size")
        if device is not None:
            log.info("kmodels does not follow device=%s: %s", device, runtime.device_name())
        cls: Any = presets.causal_lm_of(pretrained)
        model = cls.from_preset(pretrained, dtype=dtype)
        if adapter is not None:
            model.load_adapter(adapter)
        self.pretrained, self.max_gen_toks = pretrained, max_gen_toks
        self.scorer = LanguageScorer(model, int(batch_size), max_length, add_bos_token, _progress)

    def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
        """Returns (log-likelihood, True if greedy) of each (context, continuation)."""
        results = self.scorer.log_likelihoods([self.scorer.pair(*one.args) for one in requests])
        return self._cached("loglikelihood", requests, results)

    def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
        """Returns the log-likelihood of each (text,)."""
        results = self.scorer.rolling_log_likelihoods([one.args[0] for one in requests])
        return self._cached("loglikelihood_rolling", requests, results)

    def generate_until(self, requests: "list[Instance]") -> list[str]:
        """Returns the reply to each (context, settings), without the text of "until"."""
        groups: dict[str, list[int]] = {}
        for number, one in enumerate(requests):
            groups.setdefault(json.dumps(one.args[1], sort_keys=True), []).append(number)
        results: dict[int, str] = {}
        for text, numbers in groups.items():
            prompts = [self.scorer.encode(requests[i].args[0]) for i in numbers]
            replies = self.scorer.replies(prompts, **self._settings(json.loads(text)))
            results |= {i: reply for i, (reply, _) in zip(numbers, replies, strict=True)}
        return self._cached("generate_until", requests, [results[i] for i in range(len(requests))])

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments of `LanguageScorer.replies` for those of a task."""
        check_names("generate_until", settings, ("until", "do_sample", *LIMITS, *SAMPLING))
        limits = [settings[name] for name in LIMITS if settings.get(name) is not None]
        until = settings.get("until") or []
        sampling = {x: settings[x] for x in SAMPLING if settings.get(x) is not None}
        samples = settings.get("do_sample")
        if samples:
            sampling.setdefault("temperature", 1.0)
        if samples is False or not sampling.get("temperature"):
            # As in transformers, which filters no tokens where it draws none.
            sampling = {x: sampling[x] for x in sampling.keys() - {"temperature", *FILTERS}}
        return {
            "max_new_tokens": int([*limits, self.max_gen_toks][0]),
            "stop": [text for text in ([until] if isinstance(until, str) else until) if text],
            **sampling,
        }

    def _cached(self, method: str, requests: "list[Instance]", results: Any) -> Any:
        for one, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(method, one.args, result)
        return results

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a chat as the tokenizer's own template writes it."""
        return self.scorer.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template, by name if there are several; None for False."""
        if not chat_template:
            return None
        name = chat_template if isinstance(chat_template, str) else None
        return choose_template(self.scorer.tokenizer.settings, name, None)

    @property
    def tokenizer_name(self) -> str:
        """The path of the model, as a name of a file."""
        return self.pretrained.replace("/", "__")


def _progress(batches: list[Any]) -> Any:
    from tqdm import tqdm

    return tqdm(batches, desc="batches")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line of lm-evaluation-harness."""
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found]

    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    try:
        cli_evaluate()
    except InputError as error:
        print(f"kmodels: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
