"""Which value of a metric is the best, by its name."""

import re

# Words of names; a number at their end, as in top5, does not count.
_LESS = {
    *("loss", "err", "error", "errors", "perplexity", "bits", "mae", "mse", "rmse", "wer", "cer"),
    *("rejected", "divergence", "crossentropy", "hinge", "poisson", "logcosh", "fid"),
}
_MORE = {
    *("accuracy", "acc", "auc", "precision", "recall", "f", "score", "match", "ended", "top"),
    *("iou", "miou", "io", "map", "mar", "ap", "dice", "mrr", "ndcg", "margin", "reward"),
    *("similarity", "bleu", "rouge", "psnr", "ssim", "r", "sensitivity", "specificity"),
    "correlation",
}


def best_of(name: str) -> str | None:
    """Returns "min" or "max", the best value of a metric, or None if the name does not say.

    Args:
        name: name of a metric or a log, such as "val_mean_iou", "recall@10" or "step_loss".
    """
    words = {word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", name.lower())}
    return "min" if words & _LESS else "max" if words & _MORE else None
