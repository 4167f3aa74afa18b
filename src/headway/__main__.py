"""`python -m headway` is the `headway` command; the launcher starts its ranks this way."""

from headway.cli.entry import main

main()
