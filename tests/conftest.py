"""The repository's modules are importable, and torch takes one core: faster and repeatable."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
