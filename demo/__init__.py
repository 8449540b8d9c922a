"""The demo model, its draft, and the script that trained them."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "model"
DEMO_DRAFT = Path(__file__).parent / "draft"
