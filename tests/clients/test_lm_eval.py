"""lm-eval: endings of sentences by their log-likelihood, over `local-completions`, and greedy generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from served import Served

lm_eval = pytest.importorskip("lm_eval")

# what goes on sensibly is easy to tell, even for a small model
CASES = [
    ("A man sits down at a piano. He", ["begins to play a song.", "melts into the green sky seven."]),
    ("She pours water into the kettle and", ["waits for it to boil.", "marries the kettle of blue."]),
    ("The sun rises in the", ["east every morning.", "spoon under the carpet."]),
    ("He opens the umbrella because it", ["is raining outside.", "umbrella the the of loud."]),
    ("The dog runs after the ball and", ["brings it back.", "votes it parliament."]),
    ("In winter the lake is", ["covered with ice.", "covered with telephone grammar."]),
    ("The teacher writes on the", ["blackboard.", "Tuesday of soup."]),
    ("After dinner they wash the", ["dishes.", "gravity of noun."]),
]

TASK = """
task: endings
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{ctx}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: endings
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for place, (ctx, endings) in enumerate(CASES):
        turned = place % 2
        rows.append({"ctx": ctx, "endings": endings[::-1] if turned else endings, "label": turned})
    (folder / "endings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "endings.yaml").write_text(TASK.format(data=folder / "endings.jsonl"))
    return folder


def evaluate(server: Served, tasks: Path, tokenizer: Path, **more: Any) -> Any:
    arguments = {
        "model": "small",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
        **more,
    }
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["endings"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
    )


@pytest.mark.parametrize("tokenized", [True, False])
def test_log_likelihoods(server: Served, tasks: Path, tokenizer: Path, tokenized: bool) -> None:
    """Sums over the ending alone, from the logprobs of an echoed prompt."""
    found = evaluate(server, tasks, tokenizer, tokenized_requests=tokenized)
    assert found["results"]["endings"]["acc,none"] >= 0.75
    for sample in found["samples"]["endings"]:
        for value, _ in (
            response[0] if isinstance(response[0], tuple | list) else response for response in sample["resps"]
        ):
            assert float(value) < 0
