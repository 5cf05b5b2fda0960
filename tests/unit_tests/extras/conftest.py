"""extras/zbpp_light is a package of its own, installed nowhere here: its folder goes on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "extras" / "zbpp_light"))
