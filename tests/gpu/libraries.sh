# For the scripts beside this, which source it: the CUDA libraries that SPARK_<NAME>_LIBRARY name,
# or else built here for the GPU at hand; in $OUT what the compiler said.
libraries() { # NAME…
    local name variable path
    for name; do
        variable=SPARK_${name^^}_LIBRARY
        path=${!variable:-$PWD/overlay/build/$name/_cuda.so}
        if [[ $path == none ]]; then
            echo "$name: $variable says that there is none, and this needs it"
            return 1
        fi
        if [[ ! -e $path ]]; then
            timeout 150 python3 overlay/csrc/build_cuda.py "--$name" "$path" >"$OUT/$name.build.log" 2>&1 ||
                { echo "$name: its library is not built, see $OUT/$name.build.log"; return 1; }
        fi
        export "$variable=$path"
    done
}
