"""Inner plan: an integer program over the options of every operator, solved by HiGHS."""
