"""`python -m service`: the same as `photoninfer`."""

from service.cli import main

raise SystemExit(main())
