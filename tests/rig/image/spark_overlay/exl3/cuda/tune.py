"""A stand-in for the tuner: its command line and its words, and a table that nobody measured."""

import json
import sys

assert sys.argv[1:] == ["--print", "--tp", "2"], sys.argv
TABLE = {
    "name": "sm_121",
    "origin": "measured",
    "how": "made up by the rig",
    "sms": 48,
    "shared_kb": 100,
    "group": [{"shapes": [[5120, 1280, 10]], "rows": 8, "warps": 8, "parts": [[1, 5]]}],
    "experts": [],
}
print("5120x1280 K2=10, 8 rows: 9.1 us by the rule, 8.0 by a plan of 12", flush=True)
print("table " + json.dumps(TABLE), flush=True)
