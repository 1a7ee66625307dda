"""The optimisers of the demo model's training: Muon for matrices, AdamW for all else."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.02, 1.5e-3
MOMENTUM = 0.95
DECAY = 0.01
GRADIENT_NORM_MAX = 2.0
WARMUP_STEPS = 30
HOLD = 0.45         # share of the steps at the full rate, before it falls linearly
RATE_END = 0.02     # share of the full rate at the last step
NOT_MUON = ("embed", "lm_head", "heads")  # tables and output layers: their rows have a meaning of their own


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made nearly orthogonal before they are applied: at this size it
    learns in a third of AdamW's steps.  Equal shapes are one batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                updates = _orthogonal(torch.stack([self._momentum(param) for param in params]))
                rate = group["lr"] * max(1, shape[0] / shape[1]) ** 0.5
                for param, update in zip(params, updates):
                    param.mul_(1 - group["lr"] * DECAY).add_(update, alpha=-rate)

    def _momentum(self, param: nn.Parameter) -> Tensor:
        state = self.state[param]
        if not state:
            state["mean"] = torch.zeros_like(param)
        state["mean"].lerp_(param.grad, 1 - MOMENTUM)
        return param.grad.lerp(state["mean"], MOMENTUM)


def _orthogonal(batch: Tensor) -> Tensor:
    """Newton-Schulz iteration; the constants are Muon's own."""
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Teacher:
    """Both optimisers with one schedule over `steps`."""

    def __init__(self, module: nn.Module, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.params = [p for p in module.parameters() if p.requires_grad]
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, param in module.named_parameters():
            if param.requires_grad:
                fit = param.ndim == 2 and not any(word in name for word in NOT_MUON)
                (matrices if fit else others).append(param)
        self.optimisers = [
            (Muon(matrices, MUON_RATE), MUON_RATE),
            (torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.98), weight_decay=DECAY),
             ADAM_RATE)]

    def learn(self) -> None:
        """Apply the gradients and clear them."""
        share = self.done / self.steps
        factor = min(1.0, (self.done + 1) / WARMUP_STEPS)
        if share > HOLD:
            factor *= max(RATE_END, (1 - share) / (1 - HOLD))
        torch.nn.utils.clip_grad_norm_(self.params, GRADIENT_NORM_MAX)
        for optimiser, rate in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad()
        self.done += 1
