"""`python -m eagle_chain.engines`: the same as the command `eagle-chain`."""

import sys

from eagle_chain.engines.entry import main

sys.exit(main())
