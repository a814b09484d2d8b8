"""What a bare `kmodels` shows: an example of each command."""

from kmodels import __version__

OVERVIEW = f"""kmodels {__version__}: Keras 3 models at native speed on JAX, PyTorch and TensorFlow.

Train, resume or evaluate:
  kmodels vit --data folder:IMAGES        a classifier, on a folder of images
  kmodels gemma --data LINES.jsonl        Gemma or Qwen 3 with LoRA, on texts
  kmodels probe --data folder:IMAGES      a linear probe of a frozen backbone
  kmodels distill --data folder:IMAGES    a small model taught by a large one
  kmodels caption --data FOLDER           Gemma 3 on images with texts
  kmodels segment --data folder:DIR       the class of each pixel, by masks
  kmodels zero-shot --data folder:IMAGES  two towers, to classify by names
  kmodels mae --data folder:IMAGES        an encoder, from images without labels
  kmodels dino --data folder:IMAGES       the same, by a teacher that follows it
  kmodels dpo --data PAIRS.jsonl          a language model, on preferred answers

Use a model or the model of a run:
  kmodels predict RUN FILES           classes of images, or of their pixels
  kmodels generate RUN --prompts FILE             replies to its prompts
  kmodels chat MODEL                  a chat in the terminal, or through a pipe

Inspect models and machines:
  kmodels doctor                      backend, versions, devices, fast ops
  kmodels plan --preset vit_base_patch16_224      the memory that training needs
  kmodels bench vit_small_patch16_224             the speed of each backend
  kmodels parity vit_debug            the first layer where two backends differ
  kmodels report RUN                  the page of a run, report.html
  kmodels compare RUN1 RUN2           runs beside each other, compare.html

Export models:
  kmodels convert RUN/model FILE.gguf --to gguf   to another package or runtime

KERAS_BACKEND chooses the backend. Flags of a command: kmodels COMMAND --help
"""
