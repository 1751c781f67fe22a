/* A call of the C interfaces (api.h of each folder): visible, and what it returns. Any status but CALL_OK:
 * nothing was launched, or CUDA refused the launch; the library's *_error() then has the text. */
#pragma once

#define EXPORTED __attribute__((visibility("default")))

enum { CALL_OK = 0, CALL_BAD_ARGUMENT = 1, CALL_CUDA = 2 };
