"""Decision rules: each proposes findings from the facts of one timeline."""
