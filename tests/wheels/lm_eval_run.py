"""Answers of lm-evaluation-harness's own `hf` model and of ours to the same tasks: `HF_DIR OUR_DIR TASKS_DIR OUT`.

OUT, a JSON object: by model (hf, ours) the results of simple_evaluate, and the answers to single requests.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tools import evaluate, inference
from tools.evaluation.harness_model import HarnessModel
from tools.evaluation.scorer import Scorer

PAIRS = [("The cat", " sat"), ("", "on"), ("a ", "b c"), ("x" * 70, "y" * 9), ("Caf\u00e9", "\ngro\u00df")]
ROLLING = ["x", "The cat sat on the mat. " * 6, "Caf\u00e9"]
GENERATED = [
    ("The cat", {"until": ["q"], "max_gen_toks": 12}),
    ("y" * 80, {"until": ["\n\n"], "max_gen_toks": 20}),
]
KINDS = {
    "loglikelihood": PAIRS,
    "loglikelihood_rolling": [(text,) for text in ROLLING],
    "generate_until": GENERATED,
}


def ours_of(folder):
    config, load = inference.open_checkpoint(folder, None)
    ps = inference.join_ranks(inference.argparse.Namespace(device="cpu"), evaluate.LaunchEnv())
    config = config.replace(seq_length=config.model.max_position_embeddings)
    tokenizer = inference.build_from_config(config.tokenizer)
    return HarnessModel(Scorer(inference.filled_model(config, load, ps), ps), tokenizer, 3)


def answers(model):
    """To each kind of request."""
    found = {}
    for kind, every in KINDS.items():
        requests = [Instance(kind, {}, args, number) for number, args in enumerate(every)]
        found[kind] = getattr(model, kind)(requests)
    return found


def command_line(folder, tasks, names):
    """The results that tools/evaluate.py prints."""
    words = [
        "--load",
        folder,
        "--tasks",
        ",".join(names),
        "--include-path",
        tasks,
        "--json",
        "--device",
        "cpu",
    ]
    sys.argv = ["evaluate.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        evaluate.main()
    return json.loads(out.getvalue().splitlines()[-1])["results"]


def main(hf, ours, tasks, out):
    names = sorted(path.stem for path in Path(tasks).glob("*.yaml"))
    manager = TaskManager(include_path=tasks, include_defaults=False)
    theirs = HFLM(pretrained=hf, device="cpu", dtype="float32", batch_size=2)
    results = simple_evaluate(model=theirs, tasks=names, task_manager=manager, bootstrap_iters=0)["results"]
    found = {
        "hf": {"results": results, **answers(theirs)},
        "ours": {"results": command_line(ours, tasks, names), **answers(ours_of(ours))},
    }
    Path(out).write_text(json.dumps(found, default=float))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
