"""What a budget counts and sizes of loaded parts: of reduced drafts, and of heads that decode."""

from foretoken.engine.loading import load
from foretoken.heads.eagle import Eagle
from foretoken.heads.store import save
from foretoken.lm.runtime.cache import rounded

PROMPTS = [list(range(1, 1 + n)) for n in (5, 40, 17)]


def test_the_whole_output_layer_of_a_reduced_draft_is_counted(make_llama, byte_tokenizer):
    count = len(byte_tokenizer)
    target, draft = make_llama(count), make_llama(count, seed=1, tie_word_embeddings=False)
    options = {"compile": "off", "kernels": "inplace", "memory_budget": "1GiB"}
    with load(target, "chain", draft, draft_vocabulary=range(40), **options) as session:
        layout = session.engine.waiting.room.layout
        models = target, session.draft.base.model
        own = sum(one.nbytes for model in models for one in model.parameters())
        buffers = sum(one.nbytes for model in models for one in model.buffers())
        assert layout.loaded == own + buffers + draft.lm_head.weight.nbytes


def test_a_budget_sizes_the_cache_of_a_head_that_decodes(make_llama, byte_tokenizer, tmp_path):
    count = len(byte_tokenizer)
    head = Eagle(Eagle.Config(hidden_size=64, vocab_size=count, heads=2, inner=32))
    options = {"draft_head": str(save(tmp_path / "head", "eagle", head, {}))}
    options |= {"controller": "fixed", "depth": 3, "nodes": 6, "memory_budget": "1GiB"}
    with load(make_llama(count), "eagle2", compile="off", kernels="inplace", **options) as session:
        results = session.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
        assert len(results) == len(PROMPTS)
        cache, waiting = session.engine.drafter.model.decoder.cache, session.engine.waiting
        layout, need = waiting.room.layout, waiting.granted
        assert [role for role, _ in waiting.caches] == ["target", "head"]
        assert cache.exact and cache.slots == need.rows == len(PROMPTS)
        assert cache.columns == rounded(layout.draft_columns(need))
        held = sum(group.keys.nbytes + group.values.nbytes for group in cache.groups)
        assert held == layout.head_memory(need)
