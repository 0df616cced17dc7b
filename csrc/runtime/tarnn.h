/* The runtime of programs for C, and for whatever calls C: a packed model is opened, reads tokens, and gives logits.
 *
 *     tarnn_program* program;
 *     tarnn_state* state;
 *     if (tarnn_open("model.tarnn", &program) || tarnn_new(program, 1, &state)) return fprintf(stderr, "%s\n", tarnn_error()), 1;
 *     float* logits = malloc(tarnn_num_outputs(program) * sizeof *logits);
 *     tarnn_read(state, prompt, &length, 2, logits);
 *     for (int i = 0; i < 100; ++i) { token = argmax(logits); tarnn_step(state, &token, 2, logits); }
 *     tarnn_free(state), tarnn_close(program);
 *
 * `tarnn pack FOLDER FILE` writes the file. The library is libtarnn.so (libtarnn.dylib), which needs neither torch nor Python.
 *
 * Each function that can fail returns TARNN_OK, which is 0, or another code; tarnn_error() then has one sentence that says what was
 * expected, what came, and what to do. Where a function fails it changes nothing: neither states nor what it would have returned.
 *
 * A program can be used by several threads at once. A state can't: let one thread at a time read, step, copy, save or free it. The logits of a sequence
 * depend on its own tokens alone: not on other sequences in the state, on the number of threads, or on how its tokens are cut into calls.
 */
#ifndef TARNN_H
#define TARNN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TARNN_API __attribute__((visibility("default")))
#else
#define TARNN_API
#endif

enum tarnn_code {
  TARNN_OK = 0,
  TARNN_BAD_ARGUMENT = 1, /* a null pointer, a number out of its range */
  TARNN_BAD_FILE = 2,     /* missing, no packed file, damaged, or of another version */
  TARNN_BAD_TOKEN = 3,    /* outside of the vocabulary, or beyond the last position */
  TARNN_BAD_STATE = 4,    /* saved bytes that are none, damaged, or of another program */
  TARNN_NO_MEMORY = 5,
  TARNN_NO_PROCESSOR = 6, /* this build has no kernels for this processor */
  TARNN_FAILED = 7,       /* anything else */
  TARNN_NO_TOKENIZER = 8  /* the file has none, or one of a kind that is not read here */
};

typedef struct tarnn_program tarnn_program; /* a model that is open, which nothing changes */
typedef struct tarnn_state tarnn_state;     /* where some sequences stand */

/* The sentence of this thread's last failure, until its next one; "" before the first. */
TARNN_API const char* tarnn_error(void);

/* Maps a packed file. It must not be changed while it is open; it may be replaced. */
TARNN_API int tarnn_open(const char* path, tarnn_program** program);

/* Opens a packed file that lies in memory, at a multiple of 64 bytes. It must stay there as it is until the program and its states are gone. */
TARNN_API int tarnn_open_bytes(const void* bytes, size_t size, tarnn_program** program);

/* Closes it; states of it stay, and keep what they need. Null is allowed. */
TARNN_API void tarnn_close(tarnn_program* program);

TARNN_API int64_t tarnn_vocab_size(const tarnn_program* program);  /* tokens are 0 to this − 1 */
TARNN_API int64_t tarnn_num_outputs(const tarnn_program* program); /* logits of a sequence */
TARNN_API int64_t tarnn_num_positions(const tarnn_program* program); /* most tokens of a sequence; 2⁶² where there is no limit */

/* Makes the state of so many sequences that have read nothing. */
TARNN_API int tarnn_new(const tarnn_program* program, int64_t sequences, tarnn_state** state);

/* Frees it. Null is allowed. */
TARNN_API void tarnn_free(tarnn_state* state);

TARNN_API int64_t tarnn_sequences(const tarnn_state* state);
TARNN_API int64_t tarnn_position(const tarnn_state* state, int64_t sequence); /* tokens that it has read; −1 where there is none */

/* Reads counts[i] tokens of each sequence i; tokens: those of the first, then those of the next. logits: of each sequence, after its last
 * token; those of a sequence that has no token here are left as they are. threads: 1 or more. */
TARNN_API int tarnn_read(tarnn_state* state, const int64_t* tokens, const int64_t* counts, int threads, float* logits);

/* Reads one token of each sequence. */
TARNN_API int tarnn_step(tarnn_state* state, const int64_t* tokens, int threads, float* logits);

/* Copies `count` sequences, in the order of `which`, where one may stand several times; null: all of them. */
TARNN_API int tarnn_fork(const tarnn_state* state, const int64_t* which, int64_t count, tarnn_state** copy);

/* Writes a state into `room` bytes, and how many it takes into *size; a null `bytes` asks for the size alone. The same state gives the same
 * bytes. */
TARNN_API int tarnn_save(const tarnn_state* state, void* bytes, size_t room, size_t* size);

/* Makes the state that was saved, of this program. */
TARNN_API int tarnn_load(const tarnn_program* program, const void* bytes, size_t size, tarnn_state** state);

/* ---- Texts: all of tarnn's own tokenizers (bytes, letters, byte-level BPE) are read here. Others: programs take the ids of tokens anyway. */

typedef struct tarnn_tokenizer tarnn_tokenizer; /* what nothing changes, and several threads can use */

/* The tokenizer of a packed file; it needs the program no longer. */
TARNN_API int tarnn_open_tokenizer(const tarnn_program* program, tarnn_tokenizer** tokenizer);

/* Frees it. Null is allowed. */
TARNN_API void tarnn_close_tokenizer(tarnn_tokenizer* tokenizer);

/* Writes the tokens of a text into `room` places, and their number into *count; null `tokens` ask for the number alone. starts: not 0 for a
 * text that follows nothing; then an empty one has a token, too. */
TARNN_API int tarnn_encode(const tarnn_tokenizer* tokenizer, const char* text, size_t bytes, int starts, int64_t* tokens, size_t room, size_t* count);

/* What a token stands for, until the tokenizer is closed: *bytes of UTF-8, where a character may be spread over several tokens. */
TARNN_API const char* tarnn_bytes_of(const tarnn_tokenizer* tokenizer, int64_t token, size_t* bytes);

/* Not 0 for a token that ends a text. */
TARNN_API int tarnn_is_end(const tarnn_program* program, int64_t token);

/* How a token is drawn. temperature 0: the likeliest; top_p 1, min_p 0 and top_k 0 are off. */
typedef struct tarnn_sampling {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
} tarnn_sampling;

/* How the model's makers draw from it; seed 0. */
TARNN_API void tarnn_default_sampling(const tarnn_program* program, tarnn_sampling* sampling);

/* Draws a token from the logits of one sequence. position: which token of the answer this is, from 0 on. The random number is a function of seed
 * and position, so that `tarnn generate --seed` draws the same. */
TARNN_API int tarnn_draw(const tarnn_program* program, const tarnn_sampling* sampling, int64_t position, const float* logits, int64_t* token);

#ifdef __cplusplus
}
#endif

#endif
