import pytest

from megatron.core.available_memory import left_in_container


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 100"}, 400),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": "anon 5"}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "990",
                "memory/memory.stat": "total_inactive_file 7",
            },
            17,
        ),
        ({}, None),
    ],
)
def test_what_a_container_leaves(tmp_path, files, left):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert left_in_container(tmp_path) == left
