// SPDX-License-Identifier: BSD-3-Clause
//
// Text assembled from values. It avoids std::ostream: if a toolchain links part of libstdc++ into the module, the
// locale facets of that part clash with those of the libstdc++ that torch has loaded, and printing the first number
// crashes.
#pragma once

#include <cstdio>
#include <string>
#include <type_traits>

namespace fdm {

class Text {
public:
  const std::string &str() const { return text_; }

  Text &operator<<(char c) {
    text_ += c;
    return *this;
  }
  Text &operator<<(const char *words) {
    text_ += words;
    return *this;
  }
  Text &operator<<(const std::string &words) {
    text_ += words;
    return *this;
  }
  Text &operator<<(const void *address) { return print("%p", address); }
  Text &operator<<(double number) { return print("%g", number); }
  template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>> Text &operator<<(Number number) {
    text_ += std::to_string(number);
    return *this;
  }

private:
  template <class Value> Text &print(const char *format, Value value) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, format, value);
    return *this << static_cast<const char *>(buffer);
  }

  std::string text_;
};

} // namespace fdm
