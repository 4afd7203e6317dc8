"""A torch module whose forward and backward run on the swarm's hosts.

::

    model = swarm.pipeline()
    for tokens in loader:
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

There is no optimizer to step: hosts step once the swarm's global batch is full. A call's gradients are weighted by its
tokens, so the loss must be a mean over them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.pipeline.client.sender import MicrobatchSender, Opened
from p2ptrain.pipeline.messages import pack
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.training.bridge import Bridge


class PipelineModule(nn.Module):
    """The whole model, on the swarm's hosts. The caller may set ``loss`` to that of the last backward."""

    def __init__(self, sender: MicrobatchSender, plan: PipelinePlan, bridge: Bridge) -> None:
        super().__init__()
        self.loss: float | None = None
        self._sender = sender
        self._plan = plan
        self._bridge = bridge
        self._anchor = torch.zeros((), requires_grad=True)  # Makes autograd call backward: ids have no gradient.

    @property
    def round(self) -> int:
        """The round in progress; -1 before it is known."""
        return self._sender.round

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the model's output for a microbatch, fp32 on the CPU.

        Args:
            inputs: Token ids ``[samples, length]``, up to the model's context.

        Raises:
            UsageError: The inputs have another shape or type.
            TemporaryError: The microbatch failed after all retries.
        """
        tokens = inputs.detach().cpu()
        spec = self._plan.manifest.model
        if tokens.dim() != 2 or tokens.is_floating_point() or not 0 < tokens.shape[1] <= spec.context:
            raise UsageError(
                f"the model takes token ids [samples, up to {spec.context}], not {tokens.dtype} {list(tokens.shape)}"
            )
        requires_grad = torch.is_grad_enabled()
        samples, length = tokens.shape
        payload = pack(tokens, self._plan.manifest.pipeline.codec)
        shape = (samples, length, self._plan.num_classes)
        opened = self._bridge.wait(
            self._sender.open(payload, samples, samples * length, shape, requires_grad=requires_grad)
        )
        output = opened.waiting.output.result()
        if not requires_grad:
            return output
        through: torch.Tensor = _Through.apply(self._anchor, output, opened, self._bridge)  # type: ignore[no-untyped-call]
        return through


class _Through(torch.autograd.Function):
    """The swarm's output, whose backward sends the gradient to the swarm."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor, opened: Opened, bridge: Bridge) -> torch.Tensor:
        ctx.opened, ctx.bridge = opened, bridge
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.bridge.wait(ctx.opened.backward(gradients[0].detach().float().cpu().contiguous()))
        return torch.zeros(()), None, None, None
