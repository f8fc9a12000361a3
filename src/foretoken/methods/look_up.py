"""Guesses looked up in what was written before; no second model."""

from foretoken.methods.method import Family, Method

LONG = 32  # copies go on for long, and chances say how far; nothing is drafted beyond what pays
EVERY = 10**9  # occurrences: a text has fewer

FAMILY = Family(
    "look-up",
    "what was written before: the prompt, earlier answers, the target's own scores, a datastore",
    "nothing; a datastore for rest and retrieval-dense",
    (
        Method(
            "prompt-lookup",
            "continue the way the last n-gram continued before",
            drafter="drafters.prompt_lookup:PromptLookup",
            verifier="point",
            defaults={"max_depth": LONG},
            paper_options={"depth": 10},
            paper="github.com/apoorvumang/prompt-lookup-decoding",
        ),
        Method(
            "suffix",
            "follow the most frequent continuations in this request and in earlier answers",
            drafter="drafters.suffix:SuffixDecoding",
            verifier="point",
            defaults={"depth": 32, "nodes": 32, "max_depth": LONG},
            paper_options={"branching": False, "max_match": 64, "occurrences": EVERY},
            paper="arXiv 2411.04975",
        ),
        Method(
            "token-recycling",
            "reuse what the target said about every token it scored, right or wrong",
            drafter="drafters.token_recycling:TokenRecycling",
            verifier="point",
            models=("target",),
            defaults={"depth": 6, "nodes": 80},
            paper_options={"from_prompt": False},
            paper="arXiv 2408.08696",
        ),
        Method(
            "lookahead",
            "the target iterates on a window of its own future; n-grams seen there are the guesses",
            drafter="drafters.lookahead:Lookahead",
            verifier="point",
            defaults={"depth": 10, "nodes": 56},
            paper_options={
                "window": 15,
                "guesses": 15,
                "from_text": False,
                "depth": 18,
                "nodes": 120,
            },
            paper="arXiv 2402.02057",
        ),
        Method(
            "rest",
            "continue the way a datastore of texts continued",
            drafter="drafters.retrieval:Retrieval",
            verifier="point",
            models=("target",),
            needs=("datastore",),
            defaults={"depth": 10, "nodes": 64},
            paper_options={"min_match": 2, "occurrences": 5000},
            paper="arXiv 2311.08252",
        ),
        Method(
            "retrieval-dense",
            "continue the way texts did where the target was in a similar state",
            drafter="drafters.dense_retrieval:DenseRetrieval",
            verifier="point",
            models=("target",),
            needs=("keys",),
            defaults={"depth": 10, "nodes": 64},
            paper="arXiv 2505.00105, 2504.08386, 1911.00172",
        ),
    ),
)
