"""``python -m launcher VERB``: what start.sh hands over to."""

from __future__ import annotations

import sys

from launcher.cli import main

sys.exit(main(sys.argv[1:]))
