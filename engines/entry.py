"""Where the command line enters: all imports inside a try, so that Ctrl-C is one word."""

import sys


def main() -> int:
    """Run `cli.main`; an interrupt while that is still being imported ends as one later does."""
    try:
        from eagle_chain.engines import cli

        return cli.main()
    except KeyboardInterrupt:
        print("eagle-chain: interrupted", file=sys.stderr)
        if "--json" in sys.argv:
            print('{"error": "interrupted"}')
        return 130
