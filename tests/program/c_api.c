/* A packed model from C: what it reads in several ways, written to a file for a test to compare. Usage: c_api FILE OUT THREADS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tarnn.h"

static FILE* out;
static int64_t num_outputs;
static float* logits;

static void check(int code) {
  if (code == TARNN_OK) return;
  fprintf(stderr, "%d: %s\n", code, tarnn_error());
  exit(1);
}

static void write_rows(int64_t rows) { fwrite(logits, sizeof *logits, (size_t)(rows * num_outputs), out); }

/* A state as saved bytes, and back. */
static tarnn_state* saved_and_loaded(const tarnn_program* program, const tarnn_state* state) {
  size_t size = 0, again = 0;
  tarnn_state* loaded = NULL;
  check(tarnn_save(state, NULL, 0, &size));
  char *bytes = malloc(size), *others = malloc(size);
  check(tarnn_save(state, bytes, size, &size));
  check(tarnn_load(program, bytes, size, &loaded));
  check(tarnn_save(loaded, others, size, &again));
  if (again != size || memcmp(bytes, others, size)) exit(2);
  free(bytes), free(others);
  return loaded;
}

int main(int argc, char** argv) {
  const int64_t prompt[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}, counts[] = {7, 4}, next[] = {8, 9}, which[] = {1, 0, 1}, three[] = {7, 9, 3};
  const int64_t more[] = {2, 3, 8, 4, 6}, none_and_five[] = {0, 5};
  tarnn_program* program = NULL;
  tarnn_state *state = NULL, *fork = NULL, *loaded;
  if (argc != 4) return 3;
  const int threads = atoi(argv[3]);
  check(tarnn_open(argv[1], &program));
  if (!(out = fopen(argv[2], "wb"))) return 4;
  num_outputs = tarnn_num_outputs(program);
  logits = calloc((size_t)(3 * num_outputs), sizeof *logits);

  check(tarnn_new(program, 2, &state));
  check(tarnn_read(state, prompt, counts, threads, logits)), write_rows(2);
  check(tarnn_step(state, next, threads, logits)), write_rows(2);
  check(tarnn_fork(state, which, 3, &fork));
  check(tarnn_step(fork, three, threads, logits)), write_rows(3);
  loaded = saved_and_loaded(program, state);
  tarnn_free(state), tarnn_free(fork), tarnn_close(program);
  check(tarnn_read(loaded, more, none_and_five, threads, logits)), write_rows(2);
  check(tarnn_step(loaded, next, threads, logits)), write_rows(2);
  if (tarnn_position(loaded, 0) != 9 || tarnn_position(loaded, 1) != 11 || tarnn_position(loaded, 2) != -1) return 5;
  tarnn_free(loaded), free(logits);
  return fclose(out);
}
