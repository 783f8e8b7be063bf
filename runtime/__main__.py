"""`python -m eagle_chain.runtime BUNDLE --prompt TEXT`: the same as `eagle-chain generate`."""

import sys

from eagle_chain.engines.entry import main

sys.exit(main(["generate", *sys.argv[1:]]))
