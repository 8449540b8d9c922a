// The C interface: a whole step of a decoder in one call, and its parts for tests. Python holds all memory.
//
// Legend: T packed tokens, H KV heads, Hq query heads, D head_dim.
#include "attention.h"
#include "gemm.h"
#include "guess.h"
#include "rows.h"

using namespace tandem;

namespace {

struct Layer {
  const void *input_norm, *query_norm, *key_norm, *post_norm;  // query_norm and key_norm may be null
  Linear qkv, output, gate_up, down;
};

struct Decoder {
  Heads heads;
  float norm_eps;
  int64_t vocab_size, hidden_size, intermediate_size;
  const void* embedding;
  const void* final_norm;
  Linear lm_head;
  const Layer* layers;
};

struct Step {
  Batch batch;
  const int64_t* token_ids;      // [num_tokens]
  const int64_t* positions;      // [num_tokens]
  const int64_t* slot_mapping;   // [num_tokens]
  const int64_t* logits_indices; // [num_logits]
  int64_t num_tokens, num_logits;
  const float* rope;  // [rope_positions][2][D / 2]
  int64_t rope_positions;
  float* logits;    // [num_logits - num_states][vocab_size]
  void* workspace;  // workspace_elements() of the model's type
  int64_t num_states;  // of the last ones of logits_indices: their hidden states are wanted, and no logits
  float* states;       // [num_states][hidden_size]
};

enum Error { NONE, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_SEQUENCE, BAD_PAGE, BAD_LOGITS_INDEX };

// Rows of the workspace, one after the other, each for all tokens.
struct Widths {
  int64_t hidden, qkv, attended, gate_up, activated;

  explicit Widths(const Decoder& decoder) {
    const Heads& heads = decoder.heads;
    hidden = decoder.hidden_size;
    qkv = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    attended = heads.num_heads * heads.head_dim;
    gate_up = 2 * decoder.intermediate_size;
    activated = decoder.intermediate_size;
  }
  int64_t total() const { return 3 * hidden + qkv + attended + gate_up + activated; }
};

// A token's logits may be wanted twice, so the wanted rows may be more than the tokens.
int64_t workspace_rows(int64_t num_tokens, int64_t num_logits) { return std::max(num_tokens, num_logits); }

bool is_within(int64_t value, int64_t end) { return value >= 0 && value < end; }

Error check_batch(const Batch& batch, int64_t num_tokens) {
  if (batch.query_start[0] != 0 || batch.query_start[batch.num_sequences] != num_tokens) return BAD_SEQUENCE;
  for (int64_t b = 0; b < batch.num_sequences; ++b) {
    const int64_t tokens = batch.query_start[b + 1] - batch.query_start[b], context = batch.context_lens[b];
    const int64_t pages = (context + batch.page_size - 1) / batch.page_size;
    if (tokens < 0 || context < tokens || pages > batch.max_pages) return BAD_SEQUENCE;
    for (int64_t p = 0; p < pages; ++p)
      if (!is_within(batch.page_tables[b * batch.max_pages + p], batch.num_pages)) return BAD_PAGE;
  }
  return NONE;
}

// Everything that is used as an address later.
Error check(const Decoder& decoder, const Step& step) {
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    if (!is_within(step.token_ids[t], decoder.vocab_size)) return BAD_TOKEN;
    if (!is_within(step.positions[t], step.rope_positions)) return BAD_POSITION;
    if (!is_within(step.slot_mapping[t], step.batch.num_pages * step.batch.page_size)) return BAD_SLOT;
  }
  for (int64_t i = 0; i < step.num_logits; ++i)
    if (!is_within(step.logits_indices[i], step.num_tokens)) return BAD_LOGITS_INDEX;
  return check_batch(step.batch, step.num_tokens);
}

// Norms and rotates the queries in place, the keys into the pool, and copies the values there.
template <typename E>
void place_token(const Decoder& decoder, const Step& step, int64_t index, int64_t token, E* qkv) {
  const Heads& heads = decoder.heads;
  const Layer& layer = decoder.layers[index];
  const int64_t head_dim = heads.head_dim;
  const float* angles = step.rope + step.positions[token] * head_dim;
  for (int64_t head = 0; head < heads.num_heads; ++head) {
    E* q = qkv + head * head_dim;
    if (layer.query_norm) rms_norm(q, (const E*)layer.query_norm, head_dim, decoder.norm_eps, q);
    rotate(q, angles, head_dim, q);
  }
  const int64_t page = step.slot_mapping[token] / step.batch.page_size;
  const int64_t slot = step.slot_mapping[token] % step.batch.page_size;
  E* pool = (E*)step.batch.pool;
  for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
    E* k = qkv + (heads.num_heads + head) * head_dim;
    const E* v = k + heads.num_kv_heads * head_dim;
    if (layer.key_norm) rms_norm(k, (const E*)layer.key_norm, head_dim, decoder.norm_eps, k);
    rotate(k, angles, head_dim, pool + page_offset(step.batch, heads, page, head, index, 0) + slot * head_dim);
    std::memcpy(pool + page_offset(step.batch, heads, page, head, index, 1) + slot * head_dim, v,
                (size_t)head_dim * sizeof(E));
  }
}

enum Operation { QKV, ATTENTION, OUTPUT, GATE_UP, DOWN, OPERATIONS };  // of a layer, whose threads share the work

// `nexts` are those of the layers' operations, one after the other, and of the logits.
template <typename E>
void run_step(const Decoder& decoder, const Step& step, Next nexts, Team team) {
  const Widths widths(decoder);
  const int64_t T = step.num_tokens, hidden = widths.hidden;
  const int64_t rows = workspace_rows(T, step.num_logits);
  E* x = (E*)step.workspace;
  E* normed = x + rows * hidden;
  E* delta = normed + rows * hidden;
  E* qkv = delta + rows * hidden;
  E* attended = qkv + rows * widths.qkv;
  E* gate_up = attended + rows * widths.attended;
  E* activated = gate_up + rows * widths.gate_up;
  const Range mine = share_units(T, T > BLOCK_ROWS ? ROW_UNIT : 1, team);  // as in for_each_block
  Tile tile(decoder.heads);

  for (int64_t t = mine.begin; t < mine.end; ++t)
    std::memcpy(x + t * hidden, (const E*)decoder.embedding + step.token_ids[t] * hidden, (size_t)hidden * sizeof(E));
  for (int64_t index = 0; index < decoder.heads.num_layers; ++index) {
    const Layer& layer = decoder.layers[index];
    const auto next = [&](Operation operation) { return nexts + (index * OPERATIONS + operation) * team.size; };
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      if (index) add_in_place(x + t * hidden, delta + t * hidden, hidden);
      rms_norm(x + t * hidden, (const E*)layer.input_norm, hidden, decoder.norm_eps, normed + t * hidden);
    }
    barrier();
    apply_linear(layer.qkv, normed, T, qkv, team, next(QKV));
    barrier();
    for (int64_t t = mine.begin; t < mine.end; ++t) place_token(decoder, step, index, t, qkv + t * widths.qkv);
    barrier();
    attend(step.batch, decoder.heads, index, qkv, widths.qkv, attended, widths.attended, *next(ATTENTION), tile);
    barrier();
    apply_linear(layer.output, attended, T, delta, team, next(OUTPUT));
    barrier();
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      add_in_place(x + t * hidden, delta + t * hidden, hidden);
      rms_norm(x + t * hidden, (const E*)layer.post_norm, hidden, decoder.norm_eps, normed + t * hidden);
    }
    barrier();
    if (widths.activated % PANEL == 0) {
      apply_gated(layer.gate_up, normed, T, activated, team, next(GATE_UP));
    } else {
      apply_linear(layer.gate_up, normed, T, gate_up, team, next(GATE_UP));
      barrier();
      for (int64_t t = mine.begin; t < mine.end; ++t)
        silu_multiply(gate_up + t * widths.gate_up, widths.activated, activated + t * widths.activated);
    }
    barrier();
    apply_linear(layer.down, activated, T, delta, team, next(DOWN));
    barrier();
  }
  const int64_t num_logits = step.num_logits - step.num_states;
  const Range wanted = share(step.num_logits, team);
  for (int64_t i = wanted.begin; i < wanted.end; ++i) {
    const int64_t t = step.logits_indices[i];
    E* row = normed + i * hidden;
    std::memcpy(row, x + t * hidden, (size_t)hidden * sizeof(E));
    add_in_place(row, delta + t * hidden, hidden);
    rms_norm(row, (const E*)decoder.final_norm, hidden, decoder.norm_eps, row);
    if (i >= num_logits) widen(row, hidden, step.states + (i - num_logits) * hidden);
  }
  barrier();
  apply_linear(decoder.lm_head, normed, num_logits, step.logits, team,
               nexts + decoder.heads.num_layers * OPERATIONS * team.size);
}

template <typename E>
int run_decoder(const Decoder& decoder, const Step& step, int num_threads) {
  const Error error = check(decoder, step);
  if (error != NONE) return error;
  std::vector<std::atomic<int64_t>> nexts((size_t)((decoder.heads.num_layers * OPERATIONS + 1) * num_threads));
  run_team(num_threads, [&](Team team) { run_step<E>(decoder, step, nexts.data(), team); });
  return NONE;
}

// Computes the step, chooses behind each sequence, moves on those that are guessed for again, and so on. A sequence
// that is not moved on is computed as before, which writes what is there.
template <typename E>
int run_guesses(const Decoder& decoder, const Step& step, const Guesses& guesses, int num_threads) {
  const int64_t num = step.batch.num_sequences, page_size = step.batch.page_size;
  Guesser guesser(guesses, num, decoder.vocab_size);
  std::vector<char> is_open((size_t)num, 1);
  for (bool goes_on = true; goes_on;) {
    const Error error = (Error)run_decoder<E>(decoder, step, num_threads);
    if (error != NONE) return error;
    goes_on = false;
    for (int64_t b = 0; b < num; ++b) {
      if (!is_open[(size_t)b] || !guesser.take(b, step.logits + b * decoder.vocab_size)) {
        is_open[(size_t)b] = 0;
        continue;
      }
      goes_on = true;
      const int64_t position = ++guesses.positions[b];
      const int64_t page = position / page_size;
      if (page >= step.batch.max_pages) return BAD_SEQUENCE;
      guesses.token_ids[b] = guesses.chosen[b * guesses.most + guesses.num_chosen[b] - 1];
      guesses.context_lens[b] = (int32_t)position + 1;
      const int64_t page_id = step.batch.page_tables[b * step.batch.max_pages + page];
      guesses.slot_mapping[b] = page_id * page_size + position % page_size;
    }
  }
  return NONE;
}

enum NoChoice : int64_t { TOO_CLOSE = -1, NOT_FINITE = -2 };

// Chooses for some rows of logits, each by itself.
void run_choices(const float* logits, int64_t vocab_size, const int64_t* rows, const Draw* draws, int64_t num,
                 int64_t* chosen, Team team) {
  const Range mine = share(num, team);
  std::vector<double> values;
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const float* row = logits + rows[i] * vocab_size;
    if (!can_choose(row, vocab_size)) {
      chosen[i] = NOT_FINITE;
    } else if (!(draws[i].temperature > 0)) {
      chosen[i] = likeliest(row, vocab_size);
    } else {
      values.resize((size_t)vocab_size);
      const Choice choice = race(row, vocab_size, draws[i], values.data());
      chosen[i] = choice.is_certain ? choice.token : TOO_CLOSE;
    }
  }
}

template <typename E>
int run_attention(const Batch& batch, const Heads& heads, int64_t layer, const E* q, E* out, int num_threads) {
  const Error error = check_batch(batch, batch.query_start[batch.num_sequences]);
  if (error != NONE) return error;
  const int64_t stride = heads.num_heads * heads.head_dim;
  std::atomic<int64_t> next{0};
  run_team(num_threads, [&](Team) {
    Tile tile(heads);
    attend(batch, heads, layer, q, stride, out, stride, next, tile);
  });
  return NONE;
}

template <typename E, typename Out>
void run_linear(const Linear& linear, const void* x, int64_t rows, void* y, int num_threads) {
  std::vector<std::atomic<int64_t>> next((size_t)num_threads);
  run_team(num_threads, [&](Team team) { apply_linear(linear, (const E*)x, rows, (Out*)y, team, next.data()); });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The arithmetic in use: two processes agree bit for bit if it and the sources are the same.
const char* tandem_arithmetic() {
#if defined(TANDEM_AMX)
  return has_amx() ? "avx512+amx" : "avx512+bf16";
#elif defined(TANDEM_AVX512) && defined(__AVX512BF16__)
  return "avx512+bf16";
#elif defined(TANDEM_AVX512)
  return "avx512";
#elif defined(TANDEM_AVX2)
  return "avx2";
#else
  return "portable";
#endif
}

int64_t tandem_workspace_elements(const Decoder* decoder, int64_t num_tokens, int64_t num_logits) {
  return Widths(*decoder).total() * workspace_rows(num_tokens, num_logits);
}

int tandem_forward(const Decoder* decoder, const Step* step, int is_bfloat16, int num_threads) {
  return is_bfloat16 ? run_decoder<bf16>(*decoder, *step, num_threads)
                     : run_decoder<float>(*decoder, *step, num_threads);
}

int tandem_guess(const Decoder* decoder, const Step* step, const Guesses* guesses, int is_bfloat16, int num_threads) {
  return is_bfloat16 ? run_guesses<bf16>(*decoder, *step, *guesses, num_threads)
                     : run_guesses<float>(*decoder, *step, *guesses, num_threads);
}

// The tokens of some rows of logits [..][vocab_size], top_k and top_p apart, or a NoChoice.
void tandem_choose(const float* logits, int64_t vocab_size, const int64_t* rows, const Draw* draws, int64_t num,
                   int64_t* chosen, int num_threads) {
  run_team(num_threads, [&](Team team) { run_choices(logits, vocab_size, rows, draws, num, chosen, team); });
}

int tandem_attention(const Batch* batch, const Heads* heads, int64_t layer, const void* q, void* out, int is_bfloat16,
                     int num_threads) {
  return is_bfloat16 ? run_attention(*batch, *heads, layer, (const bf16*)q, (bf16*)out, num_threads)
                     : run_attention(*batch, *heads, layer, (const float*)q, (float*)out, num_threads);
}

int64_t tandem_packed_elements(int64_t out_features, int64_t in_features, int is_bfloat16) {
  return is_bfloat16 ? packed_elements<bf16>(out_features, in_features)
                     : packed_elements<float>(out_features, in_features);
}

void tandem_pack(const void* weight, int64_t out_features, int64_t in_features, void* packed, int is_bfloat16,
                 int num_threads) {
  run_team(num_threads, [&](Team team) {
    if (is_bfloat16)
      pack((const bf16*)weight, out_features, in_features, (bf16*)packed, team);
    else
      pack((const float*)weight, out_features, in_features, (float*)packed, team);
  });
}

void tandem_linear(const Linear* linear, const void* x, int64_t rows, void* y, int is_bfloat16, int is_wide_output,
                   int num_threads) {
  if (!is_bfloat16)
    run_linear<float, float>(*linear, x, rows, y, num_threads);
  else if (is_wide_output)
    run_linear<bf16, float>(*linear, x, rows, y, num_threads);
  else
    run_linear<bf16, bf16>(*linear, x, rows, y, num_threads);
}

}  // extern "C"
#pragma GCC visibility pop
