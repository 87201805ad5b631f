// Command extenderargs decodes kube-scheduler's questions with Go's own decoder and types, and writes
// down what it has read: the answer to "how would an extender in Go have read these bytes?".
//
// Standard input has questions: the kind's letter (a: ExtenderArgs, p: ExtenderPreemptionArgs), the
// length in 4 bytes, big-endian, and the body. Each answer has the same form: letter o and the
// question as Go encodes it, or letter e and the error.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"

	extender "k8s.io/kube-scheduler/extender/v1"
)

const version = "v0.37.2" // of k8s.io/kube-scheduler, as go.mod has it

func read(kind byte, body []byte) ([]byte, error) {
	var question any = &extender.ExtenderArgs{}
	if kind == 'p' {
		question = &extender.ExtenderPreemptionArgs{}
	}
	if err := json.Unmarshal(body, question); err != nil {
		return nil, err
	}
	return json.Marshal(question)
}

func run(in io.Reader, out *bufio.Writer) error {
	head := make([]byte, 5)
	for {
		if _, err := io.ReadFull(in, head); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(in, body); err != nil {
			return err
		}
		answer, err := read(head[0], body)
		head[0] = 'o'
		if err != nil {
			head[0], answer = 'e', []byte(err.Error())
		}
		binary.BigEndian.PutUint32(head[1:], uint32(len(answer)))
		out.Write(head)
		out.Write(answer)
		if err := out.Flush(); err != nil {
			return err
		}
	}
}

func main() {
	printVersion := flag.Bool("version", false, "print the version of the types, and end")
	flag.Parse()
	if *printVersion {
		fmt.Println("extenderargs of kube-scheduler", version)
		return
	}
	if err := run(bufio.NewReader(os.Stdin), bufio.NewWriter(os.Stdout)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
