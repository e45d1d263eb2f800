"""Local SGD by all-reduce: every worker steps its own copy, and all copies become their mean every so many steps."""
