"""What operators ask: explanations, idle holders, costs, advice, demand, regret."""
