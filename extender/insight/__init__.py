"""Answers for operators: explanations, idle holders, costs, advice, demand, regret."""
