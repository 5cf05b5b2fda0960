"""What pyproject.toml cannot say: a wheel has copies of the scripts in megatron/scripts/, for `megatron-zero`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SCRIPTS = (
    "pretrain_gpt.py",
    "tools/**/*.py",
    "tools/**/*.csv",
    "tools/**/*.css",
    "tools/**/*.js",
    "tools/*.html",
    "tools/*.json",
    "examples/slurm/train.sbatch",
)


class BuildWithScripts(build_py):
    """An editable install finds them beside the package, as a checkout does (megatron/command.py)."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in sorted(path for pattern in SCRIPTS for path in Path().glob(pattern)):
            target = Path(self.build_lib, "megatron", "scripts", source)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": BuildWithScripts})
