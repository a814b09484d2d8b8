"""Looking inside a ViT: where it attends, what a class or a text is seen by, and what is alike.

Each function takes a classifier, a backbone of any kind, or CLIP or SigLIP with both towers, and
images as the model's `predict` takes them. It returns NumPy arrays, maps at the grid of the
patches, which `overlay` draws over the images. Models stay as they are: they compute without
dropout, with all their patches, and no weights of attention are made where nobody looks.
"""

from kmodels.models.interpret.attention import attention_maps, attention_rollout, rollout
from kmodels.models.interpret.gradients import grad_cam
from kmodels.models.interpret.overlay import overlay
from kmodels.models.interpret.similarity import patch_similarity

__all__ = [
    "attention_maps",
    "attention_rollout",
    "grad_cam",
    "overlay",
    "patch_similarity",
    "rollout",
]
