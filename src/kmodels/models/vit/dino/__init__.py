"""Self-distillation of a ViT without labels (Caron et al. 2021): its projection head."""
