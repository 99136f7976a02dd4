"""Ray: where processes run and how the driver calls them. Read `launch` (what starts in which order), `sharing`, then
`pool` (engines), `ranks` (models) and `weight_sync`.
"""

import os

# Read when ray is first imported. Ray's handler prints a C++ stack of the driver at SIGTERM, which the driver handles.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
