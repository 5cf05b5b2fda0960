"""Generation: neither cache nor batch changes anything, filters keep what they should."""

import pytest
import torch

from megatron.core.models.gpt.generate import Completion, Sampling, choose, generate
from megatron.core.tensor_parallel.mappings import TensorParallel
from tests.harness.ranks import RankContext, run_ranks
from tests.harness.tiny_models import (
    GQA,
    ROPE,
    VARIANTS,
    VOCAB,
    make_talkative,
    tiny_batch,
    tiny_config,
    tiny_model,
    tiny_stage,
    written_without_cache,
)

PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 3], [4, 4]]
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=5)
MODELS = {
    "gpt": {},
    "rope": {**ROPE, **GQA},
    "exact": {"attention_backend": "unfused"},
    "gemma": VARIANTS["gemma"],
    "qk_norm": VARIANTS["qk_rmsnorm_gqa_rope"],
    "no_positions": VARIANTS["no_positions"],
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_each_prompt_has_the_tokens_that_it_has_alone(name, sampling):
    """In batches of any size, computed with a cache, as every step from the start without one."""
    model = make_talkative(tiny_model(params_dtype=torch.float32, **MODELS[name]))
    alone = written_without_cache(model, PROMPTS, 8, sampling)
    model.train()
    for batch_size in (1, 3):
        made = list(generate(model, PROMPTS, 8, sampling=sampling, batch_size=batch_size))
        assert [one.ids for one in made] == alone
        assert [one.number for one in made] == [0, 1, 2, 3]
        assert {one.finish_reason for one in made} == {"length"}
    assert model.training
    assert len({tuple(one) for one in alone}) == 4, "prompts that all go on alike show nothing"


def test_numbers_decide_on_draws():
    """A prompt of many has the draws that it has alone under its number, or as the first with seed + number."""
    model = tiny_model()
    whole = list(generate(model, PROMPTS, 6, sampling=SAMPLED))
    (alone,) = generate(model, [PROMPTS[2]], 6, sampling=SAMPLED, numbers=[2])
    (first,) = generate(model, [PROMPTS[2]], 6, sampling=Sampling(0.9, 20, 0.9, seed=5 + 2))
    (other,) = generate(model, [PROMPTS[2]], 6, sampling=SAMPLED)
    assert whole[2] == alone
    assert alone.ids == first.ids != other.ids


def test_padding_of_the_vocabulary_is_never_chosen():
    model = tiny_model()
    sampling = Sampling(temperature=5.0)
    for made in generate(model, [[1, 2], [0]], 10, sampling=sampling, vocab_size=3):
        assert max(made.ids) < 3
    assert VOCAB > 3


def test_rows_that_have_ended_leave_and_change_nothing():
    """At an end of document, which is no part of the answer, or where the caller says so, who is told of each token."""
    model = make_talkative(tiny_model())
    free = [made.ids for made in generate(model, PROMPTS, 8)]
    eod, last = free[0][2], free[2][4]
    told: dict[int, list[int]] = {}

    def stop(number: int, token: int) -> bool:
        told.setdefault(number, []).append(token)
        return number == 2 and token == last

    expected = []
    for number, ids in enumerate(free):
        end = ids.index(eod) if eod in ids else 8
        stopped = ids.index(last) if number == 2 else 8
        reason = "stop" if stopped < end else "eod" if end < 8 else "length"
        expected.append(Completion(number, ids[: min(end, stopped + 1)], reason))
    assert {one.finish_reason for one in expected} == {"stop", "eod", "length"}
    assert list(generate(model, PROMPTS, 8, eod=eod, stop=stop)) == expected
    assert told == {one.number: one.ids for one in expected if one.ids}


def test_answers_come_as_soon_as_they_are_there():
    model = tiny_model()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    made = generate(model, PROMPTS, 3, batch_size=2)
    assert [next(made).number, next(made).number] == [0, 1]
    assert len(forwards) == 3
    assert [one.number for one in made] == [2, 3]


def test_no_new_tokens():
    assert [made.ids for made in generate(tiny_model(), PROMPTS, 0)] == [[]] * 4


def test_top_k_and_top_p():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    for sampling, allowed in (
        (Sampling(temperature=3.0, top_k=2), {1, 2}),
        (Sampling(temperature=1.0, top_p=0.5), {1}),
        (Sampling(temperature=3.0), {0, 1, 2, 3}),
    ):
        seen = {int(choose(logits, sampling, [(0, step)])) for step in range(200)}
        assert seen == allowed


def test_seed_decides():
    logits = torch.zeros(1, 50)
    draws = [[int(choose(logits, Sampling(1.0, seed=s), [(0, i)])) for i in range(10)] for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_too_long_is_refused():
    with pytest.raises(ValueError, match="exceed the model's 16 learned positions"):
        next(generate(tiny_model(), [*PROMPTS, tiny_batch()[0][0].tolist()], 1))
    with pytest.raises(ValueError, match="--top-p"):
        Sampling(top_p=0.0)


# Learned positions and tied embeddings; rotary ones, groups of query heads and an output layer of its own. Three layers
# over two stages are unequal.
LAYERS = 3
OVER_RANKS = {"gpt": {"num_layers": LAYERS}, "llama": {**VARIANTS["llama"], "num_layers": LAYERS}}
CALLS = {
    "greedy": {"batch_size": 2, "eod": 8},
    "sampled": {"batch_size": 1, "sampling": Sampling(temperature=1.0)},
}


def part_of_model(ctx: RankContext, tp: int, pp: int) -> dict[tuple[str, str], list[Completion]]:
    torch.set_num_threads(1)
    ps, found = ctx.make_ps(tp=tp, pp=pp), {}
    for name, flags in OVER_RANKS.items():
        stage = make_talkative(
            tiny_stage(
                tiny_config(**flags),
                params_dtype=torch.float32,
                tp=TensorParallel(ps.tp_group),
                layers=range(LAYERS * ps.pp_rank // pp, LAYERS * (ps.pp_rank + 1) // pp),
                pre_process=ps.pp_rank == 0,
                post_process=ps.pp_rank == pp - 1,
            )
        )
        for call, options in CALLS.items():
            forwards: list[int] = []

            def note(_model, _args, given, forwards=forwards):
                forwards.append(id(given["inference_cache"]))

            hook = stage.register_forward_pre_hook(note, with_kwargs=True)
            found[name, call] = list(generate(stage, PROMPTS, 5, **options, ps=ps))
            hook.remove()
            if call == "sampled":  # so many groups of one prompt are under way as there are stages
                assert len(set(forwards[:pp])) == pp, forwards
                assert forwards[pp : 2 * pp] == forwards[:pp], forwards
    return found


@pytest.mark.grid
@pytest.mark.parametrize(
    ("tp", "pp"),
    [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.full), pytest.param(1, 3, marks=pytest.mark.full)],
)
def test_over_ranks_each_prompt_has_the_tokens_of_one_process(tp, pp):
    """All ranks know them, and when they end."""
    ranks = run_ranks(part_of_model, tp * pp, tp, pp)
    for name, flags in OVER_RANKS.items():
        model = make_talkative(tiny_model(params_dtype=torch.float32, **flags))
        for call, options in CALLS.items():
            alone = list(generate(model, PROMPTS, 5, **options))
            assert all(rank[name, call] == alone for rank in ranks), (name, call)
            assert len({tuple(one.ids) for one in alone}) == len(PROMPTS)
