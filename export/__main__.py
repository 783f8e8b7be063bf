"""`python -m eagle_chain.export TRUNK DRAFT -o BUNDLE`: the same as `eagle-chain export`."""

import sys

from eagle_chain.engines.entry import main

sys.exit(main(["export", *sys.argv[1:]]))
