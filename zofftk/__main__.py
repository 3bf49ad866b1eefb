from zofftk.cli import main

raise SystemExit(main())
