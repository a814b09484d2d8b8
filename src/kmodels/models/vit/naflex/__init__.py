"""ViTs that take images of any aspect ratio as rows of patches (Dehghani et al. 2023, NaViT)."""
