"""Commands that change how many workers serve: their counts, holds on these, engines that sleep."""
