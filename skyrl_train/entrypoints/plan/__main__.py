import sys

from skyrl_train.entrypoints.plan.plan import main

sys.exit(main(sys.argv[1:]))
