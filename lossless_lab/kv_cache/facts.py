"""Facts about engines, files and families, from facts.json, which names the source of each."""

import json
from pathlib import Path

FACTS = json.loads(Path(__file__).with_name("facts.json").read_text("utf-8"))
