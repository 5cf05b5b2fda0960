"""Control groups of both versions, nested, as a container mounts them: the tightest counts."""

import pytest

from megatron.core.machine import available_bytes, total_bytes

GiB = 2**30
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
HYBRID = V1 + "\n36 31 0:33 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
NAMES = {
    "2": ("memory.max", "memory.current", "inactive_file"),
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def system(root, own, mounts, groups, *, machine=(64 * GiB, 48 * GiB)):
    """A root folder. groups: place below it -> (limit, used, droppable)."""

    def put(path, text):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")

    total, available = (size // 1024 for size in machine)
    put("proc/meminfo", f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB")
    put("proc/self/cgroup", own)
    put("proc/self/mountinfo", f"23 1 8:1 / / rw - ext4 /dev/sda rw\n{mounts}")
    for place, (limit, used, droppable) in groups.items():
        limits, usage, name = NAMES["1" if "/memory" in place else "2"]
        put(f"{place}/{limits}", limit)
        put(f"{place}/{usage}", used)
        put(f"{place}/memory.stat", f"anon 5\n{name} {droppable}")
    return root


JOB2, JOB1 = "sys/fs/cgroup/slurm/job_7", "sys/fs/cgroup/memory/slurm/job_7"
CASES = {
    # The job's own group has the limit; the topmost one has no files of limits.
    "v2": ("0::/slurm/job_7", V2.format(root="/"), {JOB2: (4 * GiB, 3 * GiB, 0)}, 4 * GiB, 1 * GiB),
    "v2, a parent is tighter": (
        "0::/slurm/job_7/step_0/task_1",
        V2.format(root="/"),
        {
            f"{JOB2}/step_0/task_1": ("max", 2 * GiB, 0),
            JOB2: (4 * GiB, 3 * GiB, GiB),
            "sys/fs/cgroup/slurm": (9 * GiB, 0, 0),
        },
        4 * GiB,
        2 * GiB,
    ),
    "v2, a namespace of its own": ("0::/", V2.format(root="/"), {"sys/fs/cgroup": (2 * GiB, GiB, 0)}, 2 * GiB, GiB),
    "v2, moved out of its namespace": (
        "0::/../other", V2.format(root="/"), {"sys/fs/cgroup": (2 * GiB, GiB, 0)}, 2 * GiB, GiB,
    ),
    "v2, no limit": ("0::/slurm/job_7", V2.format(root="/"), {JOB2: ("max", GiB, 0)}, 64 * GiB, 48 * GiB),
    "v1": (
        "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n3:cpuset:/x",
        V1.format(root="/"),
        {JOB1: (4 * GiB, 3 * GiB, GiB), "sys/fs/cgroup/memory": (9223372036854771712, 9 * GiB, 0)},
        4 * GiB,
        2 * GiB,
    ),
    # docker without a namespace: the host's path, of which the container's own group is mounted.
    "v1, a part is mounted": (
        "4:memory:/docker/abc/inner",
        V1.format(root="/docker/abc"),
        {"sys/fs/cgroup/memory/inner": (3 * GiB, GiB, 0), "sys/fs/cgroup/memory": (5 * GiB, GiB, 0)},
        3 * GiB,
        2 * GiB,
    ),
    "v1, a path of the host": (
        "4:memory:/docker/abc", V1.format(root="/elsewhere"), {"sys/fs/cgroup/memory": (5 * GiB, GiB, 0)},
        5 * GiB, 4 * GiB,
    ),
    "hybrid": (
        "4:memory:/slurm/job_7\n0::/init", HYBRID.format(root="/"), {JOB1: (4 * GiB, 5 * GiB, 0)}, 4 * GiB, 0,
    ),
    "none": ("", "", {}, 64 * GiB, 48 * GiB),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_group_counts(tmp_path, case):
    own, mounts, groups, total, available = CASES[case]
    root = system(tmp_path, own, mounts, groups)
    assert total_bytes(root) == total
    assert available_bytes(root) == available


def test_a_group_that_is_slowed_down_before_its_limit(tmp_path):
    root = system(tmp_path, "0::/slurm/job_7", V2.format(root="/"), {JOB2: (4 * GiB, GiB, 0)})
    (root / JOB2 / "memory.high").write_text(f"{3 * GiB}\n")
    assert total_bytes(root) == 3 * GiB
    assert available_bytes(root) == 2 * GiB


def test_this_machine_has_some():
    assert 0 < available_bytes() <= total_bytes()
