"""lm-evaluation-harness on a model of ours answers as on its export with the harness's own `hf` model.

Runs in `make test-wheels`, in the environment `lm-eval-0.4.13` (environments.py).
"""

import json
import re

import pytest

from tests.harness.hugging_face import save_character_tokenizer, saved_toy
from tests.harness.launch import ROOT
from tools import checkpoint

ENVIRONMENT = "lm-eval-0.4.13"
pytestmark = pytest.mark.full
DOCUMENTS = [
    {
        "text": "Das Caf\u00e9 ist gro\u00df. " * 5,
        "question": "Was?",
        "choices": ["gross", "klein", "rot"],
        "gold": 1,
    },
    {"text": "short", "question": "Wer?", "choices": ["er", "sie und er", "x"], "gold": 0},
]
TASKS = {
    "held_out": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
""",
    "said": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list:
  - {metric: exact_match}
""",
}


@pytest.fixture(scope="module")
def answers(wheels, tmp_path_factory):
    """By model, of the model of 101 ids that came from Hugging Face and went back there."""
    folder = tmp_path_factory.mktemp("lm_eval")
    start, ours, export, tasks = (folder / name for name in ("start", "ours", "export", "tasks"))
    saved_toy("odd", start)
    save_character_tokenizer(start)
    assert checkpoint.main(["import", "--hf", str(start), "--save", str(ours)]) == 0
    assert checkpoint.main(["export", "--load", str(ours), "--hf", str(export)]) == 0
    tasks.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    for name, text in TASKS.items():
        where = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}"
        (tasks / f"{name}.yaml").write_text(f"task: {name}\n{where}\ntest_split: test{text}")
    page = (ROOT / "docs" / "evaluation.md").read_text()
    printed = re.search(r"^```\n(task: held_out\n.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    printed = printed.replace("held_out", "printed").replace(
        "/data/held-out.jsonl", str(folder / "data.jsonl")
    )
    (tasks / "printed.yaml").write_text(printed)
    wheels(ENVIRONMENT).run(
        "lm_eval_run.py", export, ours, tasks, folder / "out.json", cwd=folder, timeout_s=200
    )
    return json.loads((folder / "out.json").read_text())


def test_results_of_tasks_are_hfs(answers):
    hf, ours = (answers[of]["results"] for of in ("hf", "ours"))
    assert ours.keys() == hf.keys() == TASKS.keys() | {"printed"}  # that of docs/evaluation.md
    compared = 0
    for task, theirs in hf.items():
        for metric, value in theirs.items():
            if isinstance(value, float) and "stderr" not in metric:
                assert ours[task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
                compared += 1
    assert compared >= 6


def test_answers_to_requests_are_hfs(answers):
    hf, ours = answers["hf"], answers["ours"]
    for (value, greedy), (our_value, our_greedy) in zip(
        hf["loglikelihood"], ours["loglikelihood"], strict=True
    ):
        assert our_value == pytest.approx(value, abs=1e-4)
        assert our_greedy == greedy
    assert ours["loglikelihood_rolling"] == pytest.approx(hf["loglikelihood_rolling"], abs=1e-3, rel=1e-5)
    assert ours["generate_until"] == hf["generate_until"]
