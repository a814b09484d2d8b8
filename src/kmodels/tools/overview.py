"""What a bare `kmodels` shows: an example of each command."""

from kmodels import __version__

OVERVIEW = f"""kmodels {__version__}: Keras 3 models at native speed on JAX, PyTorch and TensorFlow.

Train, and resume or evaluate what was trained:
  kmodels vit --data folder:PICTURES      a classifier, on a folder of images
  kmodels gemma --data LINES.jsonl        Gemma or Qwen 3 with LoRA, on texts
  kmodels probe --data folder:PICTURES    a linear probe of a frozen backbone
  kmodels distill --data folder:PICTURES  a small model taught by a large one
  kmodels dpo --data PAIRS.jsonl          a model, by preferred answers

Talk to a model:
  kmodels chat MODEL                  a chat in the terminal, or through a pipe

Look at models and machines:
  kmodels doctor                      backend, versions, devices, paths of ops
  kmodels plan --preset vit_base_patch16_224      the memory of training
  kmodels bench vit_small_patch16_224             the speed of each backend
  kmodels parity vit_debug            the first layer where two backends differ
  kmodels report RUN                  the page of a run, report.html
  kmodels compare RUN1 RUN2           runs beside each other, compare.html

Take models elsewhere:
  kmodels convert MODEL MODEL.gguf --to gguf      to another package or runtime

KERAS_BACKEND chooses the backend. Flags of a command: kmodels COMMAND --help
"""
