"""B without W in Megatron's linear layers, and what waits for W.

While a microbatch is split, Megatron's linear function is one of ours that passes the weight detached: autograd has no
edge to it, so B leaves it, its hooks and DDP's buffers alone. W is the backward of a graph of one node with that edge
only: autograd puts the gradient where it always does, and runs what hangs on the weight.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp_light.signatures import LINEAR, parameters

WHOLE = "zbpp_light_whole"  # an attribute of weights that are not split


class Product(NamedTuple):
    """A weight gradient that is not computed yet. group: of sequence parallelism, whose ranks each have a part of the
    input, or None; fused: Megatron's kernel adds it to `main_grad`; autocast: the type it is computed in, or None."""

    input: Tensor
    grad_output: Tensor
    group: Any
    fused: bool
    autocast: torch.dtype | None


class WeightGradients:
    """What waits for W, by microbatch. layers: Megatron's module of linear layers. While `measuring`: computed, the
    weights that W computes; most_bytes, the most that waited at a time."""

    def __init__(self, layers: Any) -> None:
        self._layers, self.linear = layers, getattr(layers, LINEAR)
        self.waiting: dict[int, dict[Tensor, list[Product]]] = defaultdict(lambda: defaultdict(list))
        self._modules: dict[int, list[Any]] = defaultdict(list)  # of Transformer Engine, which keeps what waits itself
        self.begin(-1, False)
        self.apply = _splitting_apply(self.linear, layers, self)
        self.computed: set[Tensor] = set()
        self.measuring, self.most_bytes = False, 0

    def begin(self, microbatch: int, splits: bool) -> None:
        """Layers that run from here on are of this microbatch, whose weight gradients are computed apart or not."""
        self.microbatch, self.splits = microbatch, splits

    def put_module(self, module: Any, *_: Any) -> None:
        """Behind a forward that autograd records: a layer of Transformer Engine will wait for its `backward_dw`."""
        if torch.is_grad_enabled() and self.microbatch >= 0:
            self._modules[self.microbatch].append(module)

    def run(self, microbatch: int) -> None:
        """W: what waits of a microbatch is computed and added, in the order of B."""
        waiting, modules = self.waiting.pop(microbatch, {}), self._modules.pop(microbatch, [])
        if self.measuring:
            self.computed.update(waiting, *(module.parameters(recurse=False) for module in modules))
            products = [p for each in (waiting, *self.waiting.values()) for several in each.values() for p in several]
            storages = [tensor.untyped_storage() for p in products for tensor in (p.input, p.grad_output)]
            size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            self.most_bytes = max(self.most_bytes, size)
        for weight, products in waiting.items():
            by_autograd = not products[0].fused and "grad_added_to_main_grad" in vars(weight)
            with torch.enable_grad():
                torch.autograd.backward(_WeightGradient.apply(weight, self._layers, products))
            if by_autograd and weight.grad is not None:
                raise RuntimeError(
                    "zbpp_light: DistributedDataParallel of this megatron-core, with overlap_grad_reduce or without, "
                    "takes no gradients by a hook on the weight, and would lose those of W: run it with ZBPP_LIGHT=0"
                )
        for module in reversed(modules):
            module.backward_dw()

    def forget(self) -> None:
        """Nothing is left of a step, whole or failed."""
        self.waiting.clear()
        self._modules.clear()
        self.begin(-1, False)


class _WeightGradient(torch.autograd.Function):
    """A graph of one node that ends in a weight: its backward is W, and autograd takes the gradient without a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layers: Any, products: list[Product]) -> Tensor:
        ctx.values = layers, weight, products
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None]:
        """Of all uses in a microbatch, first come first added, as autograd adds them. Fused: Megatron's kernel adds it
        to `main_grad`, and autograd gets the placeholder that Megatron's hooks expect."""
        layers, weight, products = ctx.values
        total: Tensor | None = None
        fused = products[0].fused
        while products:
            product = products.pop(0)
            for tensor in product[:2] if weight.is_cuda else ():  # B may have run on another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            tokens = product.input
            if product.group is not None:
                tokens = tokens.new_empty((tokens.shape[0] * product.group.size(), *tokens.shape[1:]))
                dist.all_gather_into_tensor(tokens, product.input.contiguous(), group=product.group)
            tokens, grad_output = tokens.flatten(0, -2), product.grad_output.flatten(0, -2)
            if fused:
                name = "wgrad_gemm_accum_fp32" if weight.main_grad.dtype == torch.float32 else "wgrad_gemm_accum_fp16"
                getattr(layers.fused_weight_gradient_mlp_cuda, name)(tokens, grad_output, weight.main_grad)
                continue
            with torch.autocast(tokens.device.type, product.autocast, enabled=product.autocast is not None):
                gradient = grad_output.t().matmul(tokens)
            total = gradient if total is None else total + gradient
        if fused and "grad_added_to_main_grad" in vars(weight):
            weight.grad_added_to_main_grad = True
            make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
            total = make(weight.main_grad.shape, dtype=weight.dtype, device=weight.device)
        return total, None, None


def _splitting_apply(linear: Any, layers: Any, gradients: WeightGradients) -> Callable[..., Any]:
    """What stands for `linear.apply`. Raises ValueError for a signature that we do not know."""
    names = parameters(linear.forward, f"{LINEAR}.forward")[1:]
    parameters(linear.backward, f"{LINEAR}.backward")
    at_weight, at_bias = names.index("weight"), names.index("bias")

    class SplitLinear(linear):
        """Megatron's linear function on a detached weight, whose gradient is put aside."""

        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            ctx.put_aside = values[at_weight].put_aside
            return linear.forward(ctx, *values)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
            # As where Megatron defers it, which needs fusion: else it takes the deferred gradient for computed.
            ctx.grad_output_buffer, ctx.wgrad_deferral_limit, ctx.gradient_accumulation_fusion = [], 0, True
            ctx.main_grad, ctx.use_bias = None, False
            input, results = ctx.saved_tensors[0], list(linear.backward(ctx, grad_output))
            assert len(ctx.grad_output_buffer) == 1, "Megatron's backward did not defer the weight gradient"
            ctx.grad_output_buffer.clear()
            weight, *how = ctx.put_aside
            product = Product(input.detach(), grad_output.detach(), *how)  # as either may hold the microbatch's graph
            gradients.waiting[gradients.microbatch][weight].append(product)
            if ctx.needs_input_grad[at_bias]:
                results[at_bias] = grad_output.flatten(0, -2).sum(dim=0)
            return tuple(results)

    plain, split = linear.apply, SplitLinear.apply  # now: later both are what stands for the first

    def apply(*values: Any) -> Any:
        call = dict(zip(names, values, strict=True))
        weight, group = call["weight"], None
        deferred = call["grad_output_buffer"] is not None or call.get("gtp_remat_size", 1) != 1
        recorded = torch.is_grad_enabled() and call["input"].requires_grad and weight.requires_grad
        whole = deferred or not recorded or not weight.is_leaf or getattr(weight, WHOLE, False)
        if whole or not gradients.splits:
            return plain(*values)
        if call["sequence_parallel"]:  # 0.12 has the group elsewhere
            group = call["tp_group"] if "tp_group" in call else layers.get_tensor_model_parallel_group()
        device, detached = weight.device.type, weight.detach()
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        detached.put_aside = weight, group, call["gradient_accumulation_fusion"], autocast
        return split(*values[:at_weight], detached, *values[at_weight + 1 :])

    return apply
