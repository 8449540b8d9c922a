// The parts of a decoder step that lie between the matrices and the attention, each as a call of its own: for a model
// whose ranks meet in the middle of a step (services/engine/parallel). The arithmetic is that of run_step.
//
// Legend: T tokens, Hq query heads, H KV heads, D head_dim.
#include "attention.h"
#include "rows.h"

using namespace tandem;

namespace {

struct Place {
  Batch batch;
  Heads heads;
  int64_t layer;
  const void *query_norm, *key_norm;  // or null
  float norm_eps;
  const int64_t* positions;     // [num_tokens]
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;
  const float* rope;  // [rope_positions][2][D / 2]
  int64_t rope_positions;
};

// As in tandem.cpp.
enum Error { NONE, BAD_POSITION = 2, BAD_SLOT = 3 };

Error check(const Place& place) {
  const int64_t num_slots = place.batch.num_pages * place.batch.page_size;
  for (int64_t t = 0; t < place.num_tokens; ++t) {
    if (place.positions[t] < 0 || place.positions[t] >= place.rope_positions) return BAD_POSITION;
    if (place.slot_mapping[t] < 0 || place.slot_mapping[t] >= num_slots) return BAD_SLOT;
  }
  return NONE;
}

// Norms and rotates a head [D].
template <typename E>
void turn_head(const Place& place, const void* norm, const float* angles, E* head, E* out) {
  const int64_t head_dim = place.heads.head_dim;
  if (norm) rms_norm(head, (const E*)norm, head_dim, place.norm_eps, head);
  rotate(head, angles, head_dim, out);
}

// Queries, normed and rotated, go to q [Hq][D], keys and values into the pool; the token's row of qkv is spoilt.
template <typename E>
void place_token(const Place& place, int64_t token, E* qkv, E* q) {
  const Heads& heads = place.heads;
  const int64_t head_dim = heads.head_dim, page_size = place.batch.page_size;
  const float* angles = place.rope + place.positions[token] * head_dim;
  for (int64_t head = 0; head < heads.num_heads; ++head)
    turn_head(place, place.query_norm, angles, qkv + head * head_dim, q + head * head_dim);
  const int64_t page = place.slot_mapping[token] / page_size, slot = place.slot_mapping[token] % page_size;
  E* pool = (E*)place.batch.pool + slot * head_dim;
  for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
    E* k = qkv + (heads.num_heads + head) * head_dim;
    const E* v = k + heads.num_kv_heads * head_dim;
    turn_head(place, place.key_norm, angles, k, pool + page_offset(place.batch, heads, page, head, place.layer, 0));
    std::memcpy(pool + page_offset(place.batch, heads, page, head, place.layer, 1), v, (size_t)head_dim * sizeof(E));
  }
}

template <typename E>
void place_tokens(const Place& place, E* qkv, E* q, int num_threads) {
  const int64_t q_width = place.heads.num_heads * place.heads.head_dim;
  const int64_t width = q_width + 2 * place.heads.num_kv_heads * place.heads.head_dim;
  run_team(num_threads, [&](Team team) {
    const Range mine = share(place.num_tokens, team);
    for (int64_t t = mine.begin; t < mine.end; ++t) place_token(place, t, qkv + t * width, q + t * q_width);
  });
}

template <typename E>
void norm_rows(const E* x, const E* weight, float eps, int64_t rows, int64_t size, E* out, int num_threads) {
  run_team(num_threads, [&](Team team) {
    const Range mine = share(rows, team);
    for (int64_t r = mine.begin; r < mine.end; ++r) rms_norm(x + r * size, weight, size, eps, out + r * size);
  });
}

template <typename E>
void activate_rows(const E* gate_up, int64_t rows, int64_t size, E* out, int num_threads) {
  run_team(num_threads, [&](Team team) {
    const Range mine = share(rows, team);
    for (int64_t r = mine.begin; r < mine.end; ++r) silu_multiply(gate_up + r * 2 * size, size, out + r * size);
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int tandem_place(const Place* place, void* qkv, void* q, int is_bfloat16, int num_threads) {
  const Error error = check(*place);
  if (error != NONE) return error;
  if (is_bfloat16)
    place_tokens(*place, (bf16*)qkv, (bf16*)q, num_threads);
  else
    place_tokens(*place, (float*)qkv, (float*)q, num_threads);
  return NONE;
}

void tandem_norm(const void* x, const void* weight, float eps, int64_t rows, int64_t size, void* out, int is_bfloat16,
                 int num_threads) {
  if (is_bfloat16)
    norm_rows((const bf16*)x, (const bf16*)weight, eps, rows, size, (bf16*)out, num_threads);
  else
    norm_rows((const float*)x, (const float*)weight, eps, rows, size, (float*)out, num_threads);
}

void tandem_activate(const void* gate_up, int64_t rows, int64_t size, void* out, int is_bfloat16, int num_threads) {
  if (is_bfloat16)
    activate_rows((const bf16*)gate_up, rows, size, (bf16*)out, num_threads);
  else
    activate_rows((const float*)gate_up, rows, size, (float*)out, num_threads);
}

}  // extern "C"
#pragma GCC visibility pop
