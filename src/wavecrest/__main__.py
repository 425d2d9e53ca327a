"""`python -m wavecrest` is the `wavecrest` program."""

import sys

from wavecrest.cli.main import main

sys.exit(main())
