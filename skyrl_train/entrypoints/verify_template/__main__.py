"""`python -m skyrl_train.entrypoints.verify_template`."""

import sys

from skyrl_train.entrypoints.verify_template.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
