"""A decoder read from a directory of transformers, and what it has in common with that model."""

import numpy as np

from arrays import read_npz, to_numpy
from tolerances import tolerance


class DecoderCase:
    """A reference of `tests/references` with the model that was read from it."""

    def __init__(self, folder, task):
        self.path = folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        self.model = task.from_preset(self.path)
        ids = self.expected["token_ids"].astype("int32")
        self.inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}

    def check_hidden_states(self):
        """Asserts that every hidden state is transformers'."""
        found = self.model.backbone.intermediates(self.inputs)
        assert len(found) == self.model.backbone.config.num_layers + 2
        for name, value in found.items():
            name = {"token_embedding": "embedding", "final_norm": "final"}.get(name, name)
            expected = self.expected[name]
            error = np.abs(to_numpy(value) - expected).max() / max(1.0, np.abs(expected).std())
            assert error < tolerance("hidden"), name

    def check_logits(self):
        """Asserts that the logits are float32 and transformers'."""
        logits = to_numpy(self.model(self.inputs))
        assert logits.dtype == np.float32
        limit = tolerance("logits")
        np.testing.assert_allclose(logits, self.expected["logits"], atol=limit, rtol=0)

    def check_bfloat16(self):
        """Asserts that logits in bfloat16 are as close to float64's as transformers' are."""
        model = type(self.model).from_preset(self.path, dtype="bfloat16")
        exact = self.expected["logits64"]
        ours = np.abs(to_numpy(model(self.inputs)) - exact).mean()
        theirs = np.abs(self.expected["logits16"] - exact).mean()
        assert ours < 1.1 * theirs

    def check_greedy_tokens(self):
        """Asserts that new tokens are transformers', of prompts with padding on their left."""
        prompts = [self.expected[f"prompt_{j}"].tolist() for j in range(3)]
        new = len(self.expected["greedy_0"])
        length = max(map(len, prompts)) + new
        ids, mask = np.zeros((3, length), "int32"), np.zeros((3, length), "int32")
        for row, there, prompt in zip(ids, mask, prompts, strict=True):
            # A prompt may stand anywhere in its row.
            row[length - new - len(prompt) : length - new] = prompt
            there[length - new - len(prompt) : length - new] = 1
        inputs = {"token_ids": ids, "padding_mask": mask}
        found = self.model.generate(inputs, max_new_tokens=new, stop_token_ids=None)["token_ids"]
        for j, prompt in enumerate(prompts):
            np.testing.assert_array_equal(found[j, : len(prompt)], prompt)
            tokens = found[j, len(prompt) : len(prompt) + new]
            np.testing.assert_array_equal(tokens, self.expected[f"greedy_{j}"])

    def check_export(self, folder):
        """Asserts that transformers gives its own logits again from an exported directory."""
        import torch

        from torchvision_cpu import define_torchvision_operators

        define_torchvision_operators()
        import transformers

        self.model.export_to_transformers(folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.no_grad():
            ids = torch.as_tensor(self.expected["token_ids"])
            logits = theirs(ids, output_hidden_states=True).logits.numpy()
        np.testing.assert_array_equal(logits, self.expected["logits"])
