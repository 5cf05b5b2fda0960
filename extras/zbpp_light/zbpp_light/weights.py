"""B without W in Megatron's linear layers, and what waits for W.

While a microbatch is split, `LinearWithGradAccumulationAndAsyncCommunication.apply` is a function of ours that passes the
weight detached: autograd has no edge to it, so B leaves it, its hooks and DDP's buffers alone. W is the backward of a
graph of one node with that edge only: autograd puts the gradient where it always does, and runs what hangs on the weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp_light.signatures import parameters

NAME = "LinearWithGradAccumulationAndAsyncCommunication"


@dataclasses.dataclass
class Product:
    """A weight gradient that is not computed yet: input, of this rank's part of the sequence under sequence parallelism,
    and output gradient. group: of sequence parallelism, or None; fused: Megatron's kernel adds it to `main_grad`."""

    input: Tensor
    grad_output: Tensor
    group: dist.ProcessGroup | None
    fused: bool
    autocast: torch.dtype | None

    def operands(self) -> tuple[Tensor, Tensor]:
        """Both as matrices with a row a token."""
        whole = self.input
        if self.group is not None:
            size = (whole.shape[0] * self.group.size(), *whole.shape[1:])
            whole = whole.new_empty(size)
            dist.all_gather_into_tensor(whole, self.input.contiguous(), group=self.group)
        return whole.reshape(-1, whole.shape[-1]), self.grad_output.reshape(-1, self.grad_output.shape[-1])

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.input, self.grad_output


class WeightGradients:
    """What waits for W, by microbatch. layers: Megatron's module of linear layers.

    most_bytes: the most that waited at a time, counted while `measuring`; split: the weights that W has computed.
    """

    def __init__(self, layers: Any) -> None:
        self._layers = layers
        self._waiting: dict[int, dict[Tensor, list[Product]]] = {}
        self._modules: dict[int, list[Any]] = {}  # of Transformer Engine, which keeps what waits itself
        self._microbatch, self._splits = -1, False
        self._apply = make_apply(getattr(layers, NAME), self)
        self.measuring = False
        self.most_bytes = 0
        self.split: set[Tensor] = set()
        self.whole: set[Tensor] = (
            set()
        )  # weights that are not split: an embedding's, which adds to their gradient in B

    def install(self) -> None:
        setattr(getattr(self._layers, NAME), "apply", self._apply)  # noqa: B010  mypy: a method

    def remove(self) -> None:
        del getattr(self._layers, NAME).apply

    @contextmanager
    def during(self, microbatch: int, splits: bool) -> Iterator[None]:
        """Layers that run in here are of this microbatch, whose weight gradients are computed apart or not."""
        self._microbatch, self._splits = microbatch, splits
        try:
            yield
        finally:
            self._microbatch, self._splits = -1, False
            if self.measuring:
                self.most_bytes = max(self.most_bytes, self._bytes())

    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """Of releases whose linear function is not given it."""
        return self._layers.get_tensor_model_parallel_group()

    def takes(self, call: dict[str, Any]) -> bool:
        """Whether a call of Megatron's linear function is split."""
        input, weight = call["input"], call["weight"]
        return (
            self._splits
            and torch.is_grad_enabled()
            and input.requires_grad
            and weight.requires_grad
            and weight.is_leaf
            and weight not in self.whole
            and call["grad_output_buffer"] is None
            and call.get("gtp_remat_size", 1) == 1
        )

    def put(self, weight: Tensor, product: Product) -> None:
        """In B: the gradient of a weight waits."""
        self._waiting.setdefault(self._microbatch, {}).setdefault(weight, []).append(product)

    def put_module(self, module: Any) -> None:
        """In a forward that autograd records: a layer of Transformer Engine will wait for its `backward_dw`."""
        if torch.is_grad_enabled() and self._microbatch >= 0:
            self._modules.setdefault(self._microbatch, []).append(module)

    def run(self, microbatch: int) -> None:
        """W: what waits of a microbatch is computed and added, each weight in the order of B."""
        waiting = self._waiting.pop(microbatch, {})
        while waiting:
            weight = next(iter(waiting))
            self._deliver(weight, waiting.pop(weight))
        for module in reversed(self._modules.pop(microbatch, [])):
            module.backward_dw()
            self.split.update(
                parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1
            )

    def forget(self) -> None:
        """A step has failed."""
        self._waiting.clear()
        self._modules.clear()

    def _deliver(self, weight: Tensor, products: list[Product]) -> None:
        self.split.add(weight)
        if products[0].fused and not hasattr(weight, "grad_added_to_main_grad"):
            _gradient(self._layers, weight, products)  # nothing for autograd, as in Megatron
            return
        with torch.enable_grad():
            torch.autograd.backward(_WeightGradient.apply(weight, self._layers, products))
        if weight.grad is not None and hasattr(weight, "main_grad"):
            raise RuntimeError(
                "zbpp_light: DistributedDataParallel of this megatron-core does not take gradients by a hook on the weight, "
                "and would leave out those computed in W: run it without zbpp_light (ZBPP_LIGHT=0)"
            )

    def _bytes(self) -> int:
        products = [
            product
            for by_weight in self._waiting.values()
            for several in by_weight.values()
            for product in several
        ]
        storages = [tensor.untyped_storage() for product in products for tensor in product.tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _WeightGradient(torch.autograd.Function):
    """A graph of one node, which ends in a weight: its backward is W. Autograd then takes the gradient without a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layers: Any, products: list[Product]) -> Tensor:
        ctx.weight, ctx.layers, ctx.products = weight, layers, products
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None]:
        return _gradient(ctx.layers, ctx.weight, ctx.products), None, None


def _gradient(layers: Any, weight: Any, products: list[Product]) -> Tensor | None:
    """The gradient of all uses of a weight in a microbatch, first come first added, as autograd adds them. Fused: it is
    added to `main_grad` here, and what is returned is the placeholder that Megatron's hooks expect."""
    total: Tensor | None = None
    fused = products[0].fused
    while products:
        product = products.pop(0)
        tokens, grad_output = product.operands()
        if tokens.is_cuda:  # B may have run on another stream
            for tensor in product.tensors():
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if fused:
            _accumulate(layers.fused_weight_gradient_mlp_cuda, tokens, grad_output, weight.main_grad)
            continue
        with torch.autocast(tokens.device.type, product.autocast, enabled=product.autocast is not None):
            gradient = grad_output.t().matmul(tokens)
        total = gradient if total is None else total + gradient
    if not fused or not hasattr(weight, "grad_added_to_main_grad"):
        return total
    weight.grad_added_to_main_grad = True
    zeros = getattr(weight, "zero_out_wgrad", False)
    return (torch.zeros if zeros else torch.empty)(
        weight.main_grad.shape, dtype=weight.dtype, device=weight.device
    )


def _accumulate(kernels: Any, tokens: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    half = main_grad.dtype in (torch.float16, torch.bfloat16)
    if not half and main_grad.dtype != torch.float32:
        raise RuntimeError(
            f"zbpp_light: fused accumulation into main_grad of {main_grad.dtype} is none of Megatron's"
        )
    kernel = kernels.wgrad_gemm_accum_fp16 if half else kernels.wgrad_gemm_accum_fp32
    kernel(tokens, grad_output, main_grad)


class _Deferring:
    """Megatron's context of a call, as its backward has it where the weight gradient is deferred: it computes the input
    gradient, with its communication, and leaves the output gradient in a list."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors
        self.grad_output_buffer: list[Tensor] = []
        self.wgrad_deferral_limit = 0
        self.gradient_accumulation_fusion = True  # else it takes the deferred gradient for computed
        self.main_grad = None
        self.use_bias = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def make_apply(linear: Any, gradients: WeightGradients) -> Callable[..., Any]:
    """What stands for `linear.apply`. Raises ValueError for a signature that we do not know."""
    names = parameters(linear.forward, f"{NAME}.forward")[1:]
    parameters(linear.backward, f"{NAME}.backward")
    at_weight, at_bias = names.index("weight"), names.index("bias")
    plain = linear.apply

    class SplitLinear(linear):
        """Megatron's linear function on a detached weight, whose gradient is put aside."""

        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            ctx.split_weight, ctx.split_call = values[at_weight].split_weight, values[at_weight].split_call
            return linear.forward(ctx, *values)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
            deferring = _Deferring(ctx)
            results = list(linear.backward(deferring, grad_output))
            assert len(deferring.grad_output_buffer) == 1, (
                "Megatron's backward did not defer the weight gradient"
            )
            grad_output = deferring.grad_output_buffer[0]
            call = ctx.split_call
            product = Product(
                deferring.saved_tensors[0], grad_output, call["group"], call["fused"], call["autocast"]
            )
            gradients.put(ctx.split_weight, product)
            if ctx.needs_input_grad[at_bias]:
                results[at_bias] = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
            return tuple(results)

    split = SplitLinear.apply  # now: later it inherits what replaces Megatron's

    def apply(*values: Any) -> Any:
        call = dict(zip(names, values, strict=True))
        if not gradients.takes(call):
            return plain(*values)
        group = None
        if call["sequence_parallel"]:
            group = call["tp_group"] if "tp_group" in call else gradients.tensor_parallel_group()
        detached: Any = call["weight"].detach()
        detached.split_weight = call["weight"]
        detached.split_call = {
            "group": group,
            "fused": call["gradient_accumulation_fusion"],
            "autocast": _autocast(detached.device.type),
        }
        return split(*values[:at_weight], detached, *values[at_weight + 1 :])

    return apply


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
