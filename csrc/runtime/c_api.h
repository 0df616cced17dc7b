// What the files of the C interface share: its handles, and codes with a sentence in the place of exceptions.
#pragma once

#include <new>
#include <string_view>

#include "common/threads.h"
#include "runtime/sequences.h"
#include "runtime/tarnn.h"
#include "runtime/tokenizer.h"

struct tarnn_program {
  std::shared_ptr<const tarnn::runtime::PackedFile> file;
};

struct tarnn_state {
  tarnn::runtime::Sequences sequences;
};

struct tarnn_tokenizer {
  tarnn::runtime::Tokenizer tokenizer;
};

namespace tarnn::runtime {

inline thread_local char sentence[512] = "";

struct NoProcessor : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline int failed(int code, const char* why) {
  sentence[std::string_view(why).copy(sentence, sizeof sentence - 1)] = '\0';
  return code;
}

/// Runs f, and makes a code and a sentence of what it throws.
template <typename F>
int guarded(F f) noexcept {
  try {
    f();
    return TARNN_OK;
  } catch (const std::bad_alloc&) {
    return failed(TARNN_NO_MEMORY, "out of memory: nothing was changed; free states, or take fewer sequences or shorter ones.");
  } catch (const OutOfMemory& error) {
    return failed(TARNN_NO_MEMORY, error.what());
  } catch (const BadFile& error) {
    return failed(TARNN_BAD_FILE, error.what());
  } catch (const BadState& error) {
    return failed(TARNN_BAD_STATE, error.what());
  } catch (const BadToken& error) {
    return failed(TARNN_BAD_TOKEN, error.what());
  } catch (const NoProcessor& error) {
    return failed(TARNN_NO_PROCESSOR, error.what());
  } catch (const NoTokenizer& error) {
    return failed(TARNN_NO_TOKENIZER, error.what());
  } catch (const std::invalid_argument& error) {
    return failed(TARNN_BAD_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return failed(TARNN_FAILED, error.what());
  } catch (...) {
    return failed(TARNN_FAILED, "an unknown error, which is one in tarnn: please report it.");
  }
}

/// Throws std::invalid_argument where a pointer is null.
inline void need(bool there, const char* what) {
  if (!there) throw std::invalid_argument(std::string(what) + " is null; give a pointer.");
}

}  // namespace tarnn::runtime
