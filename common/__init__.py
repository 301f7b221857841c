"""What the scripts share, one subject a file. Model files import nothing from here."""
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
